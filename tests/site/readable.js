// What a reader cannot read on a page: `readable.js` is evaluated in the page, and gives an object of functions.
(() => {
  const range = document.createRange();

  function* shownTexts(selector) {
    const walker = document.createTreeWalker(document.querySelector(selector), NodeFilter.SHOW_TEXT);
    for (let text = walker.nextNode(); text; text = walker.nextNode()) {
      if (!text.data.trim() || text.parentElement.closest("script, style")) continue;
      if (getComputedStyle(text.parentElement).visibility === "hidden") continue;
      range.selectNodeContents(text);
      const box = range.getBoundingClientRect();
      if (box.width > 1 && box.height > 1) yield text;
    }
  }

  // Colours, as [red, green, blue, opacity] of 0 to 255 and 0 to 1.
  const colour = (text) => {
    const [r, g, b, a = 1] = text.match(/[\d.]+/g).map(Number);
    return text.startsWith("color(srgb") ? [255 * r, 255 * g, 255 * b, a] : [r, g, b, a];
  };
  const over = (front, back) => [0, 1, 2].map((i) => front[i] * front[3] + back[i] * (1 - front[3]));
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((x) => (x <= 10 ? x / 255 / 12.92 : ((x / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ancestors = (element) => (element ? [...ancestors(element.parentElement), element] : []);
  const background = (element) =>
    ancestors(element).reduce((back, each) => over(colour(getComputedStyle(each).backgroundColor), back), [255, 255, 255]);
  const opacity = (element) =>
    ancestors(element).reduce((found, each) => found * Number(getComputedStyle(each).opacity), 1);

  function contrast(text) {
    const back = background(text.parentElement);
    const front = colour(getComputedStyle(text.parentElement).color);
    front[3] *= opacity(text.parentElement);
    const [light, dark] = [luminance(over(front, back)), luminance(back)].sort((a, b) => b - a);
    return (light + 0.05) / (dark + 0.05);
  }

  function breaks(text) {
    const found = [];
    for (const word of text.data.matchAll(/\S{2,}/g)) {
      const place = (i) => (range.setStart(text, i), range.setEnd(text, i + 1), range.getBoundingClientRect().top);
      const [start, end] = [word.index, word.index + word[0].length];
      if (place(start) + 4 > place(end - 1)) continue;
      for (let i = start + 1; i < end; i++) {
        if (place(i) > place(i - 1) + 4 && /\w\w/.test(text.data.slice(i - 1, i + 1))) found.push(word[0]);
      }
    }
    return found;
  }

  const lines = (block) => block.textContent.replace(/\n$/, "").split("\n");
  const rows = (block) => {
    const style = getComputedStyle(block);
    const height = block.clientHeight - parseFloat(style.paddingTop) - parseFloat(style.paddingBottom);
    return Math.round(height / parseFloat(style.lineHeight));
  };
  const all = (selector) => [...document.querySelectorAll(selector)];

  return {
    faint: () => [...shownTexts("main")].filter((text) => contrast(text) < 4.5).map((text) => text.data.trim().slice(0, 60)),
    brokenWords: () => [...shownTexts("article")].flatMap(breaks),
    wrappedCode: () =>
      all(innerWidth > 640 ? "article .cell_input pre" : "article pre.columns").filter((each) => rows(each) > lines(each).length).map((each) => each.textContent),
    copiedOtherwise: () =>
      all("article pre").filter((each) => each.innerText.trimEnd() !== each.textContent.trimEnd()).map((each) => each.innerText),
    emptyLastLines: () => all("article pre").filter((each) => !lines(each).at(-1).trim()).map((each) => each.textContent),
    tablesThatScroll: () =>
      all("article table.words").filter((each) => each.scrollWidth > each.clientWidth + 1).map((each) => each.innerText.slice(0, 60)),
    pictures: () =>
      all("article img").filter((each) => each.clientWidth).map((each) => [each.src, each.clientWidth / each.naturalWidth]),
  };
})();
