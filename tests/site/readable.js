// What a reader cannot read on a page: `readable.js` is evaluated in the page, and gives an object of functions.
(() => {
  const lines = (block) => block.textContent.replace(/\n$/, "").split("\n");
  const rows = (block) => {
    const style = getComputedStyle(block);
    const height = block.clientHeight - parseFloat(style.paddingTop) - parseFloat(style.paddingBottom);
    return Math.round(height / parseFloat(style.lineHeight));
  };
  const all = (selector) => [...document.querySelectorAll(selector)];

  return {
    wrappedCode: () =>
      all(innerWidth > 640 ? "article .cell_input pre" : "article pre.columns").filter((each) => rows(each) > lines(each).length).map((each) => each.textContent),
    copiedOtherwise: () =>
      all("article pre").filter((each) => each.innerText.trimEnd() !== each.textContent.trimEnd()).map((each) => each.innerText),
    emptyLastLines: () => all("article pre").filter((each) => !lines(each).at(-1).trim()).map((each) => each.textContent),
  };
})();
