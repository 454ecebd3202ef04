"""Parameters that PEFT adapts by themselves, such as the fused experts of a module, and its names for their tensors.

PEFT wraps a module once for each such parameter, in the order in which the module has them, so the last one's wrapper
is the outer one. A file tells how deep a wrapper lies, but not whose it is: the order of ``names`` does.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from reparax.io.peft.target import WRAPPED, Target, plain_name


def wrapper_names(targets: Iterable[Target]) -> dict[str, str]:
    """For each parameter that is adapted by itself, PEFT's name of its wrapper."""
    names: dict[str, str] = {}
    for module, module_targets in _by_module(targets).items():
        names |= {target.tensor: module + WRAPPED * depth for depth, target in enumerate(reversed(module_targets))}
    return names


def names_by_parameter(
    names: Collection[str], ends: tuple[str, ...], config: Mapping[str, Any], targets: Mapping[str, Target]
) -> dict[str, str]:
    """For each name of a file the plain one, in which a stack of experts stands for its wrapper."""
    owners = {wrapper: tensor for tensor, wrapper in wrapper_names(_choose_parameters(config, targets)).items()}
    plain_names, tensors_used = dict[str, str](), set[str]()
    for name in names:
        end = next((end for end in ends if name.endswith(f".{end}")), None)
        wrapper = name.removesuffix(f".{end}")
        module = wrapper
        while module.endswith(WRAPPED):
            module = module.removesuffix(WRAPPED)
        tensor = owners.get(plain_name(module) + wrapper.removeprefix(module)) if end else None
        tensors_used |= {tensor} if tensor else set()
        plain_names[name] = f"{tensor}.{end}" if tensor and targets[tensor].n_experts else plain_name(name)
    if missing := sorted(set(owners.values()) - tensors_used):
        raise ValueError(f"target_parameters lists {missing[0]!r}, but the file has no tensors for it.")
    return plain_names


def _choose_parameters(config: Mapping[str, Any], targets: Mapping[str, Target]) -> list[Target]:
    """The parameters that are adapted by themselves."""
    ends = tuple(f".{name}" for name in config.get("target_parameters") or ())
    parameters = [target for target in targets.values() if f".{target.tensor}".endswith(ends)]
    for target in parameters:
        if not target.n_experts and (len(target.shape) != 2 or not target.tensor.endswith(".weight")):
            raise ValueError(
                f"PEFT adapts {target.path!r} separately, which needs the layout of experts: "
                f"layouts={{{target.path!r}: 'experts:kernel'}} for (experts, in, out) here and (experts, out, in) in "
                f"torch, 'experts:conv1d' for (experts, in, out) in both, or 'experts:same' for (experts, out, in) in "
                f"both."
            )
    return parameters


def _by_module(targets: Iterable[Target]) -> dict[str, list[Target]]:
    """The parameters of each module, in its own order."""
    targets_of: dict[str, list[Target]] = {}
    for target in targets:
        targets_of.setdefault(target.module, []).append(target)
    for module, module_targets in targets_of.items():
        if len(module_targets) > 1 and len({target.rule for target in module_targets} - {None}) < len(module_targets):
            rules = ", ".join(f"{target.path!r}: {target.tensor!r}" for target in module_targets)
            raise ValueError(
                f"PEFT adapts several parameters of {module!r} without recording which is which, in the order of the "
                f"module. Give each its own rule in that order, such as "
                f"names={{{rules}}}."
            )
    return {
        module: sorted(module_targets, key=lambda target: target.rule or 0)
        for module, module_targets in targets_of.items()
    }
