"""What a reference must be so that its operators are seen, and what is taken off around it."""

from typing import Any

from jaxformer.errors import UsageError
from jaxformer.parity.recording.torch_values import require_torch


def unwrapped_reference(module: Any) -> Any:
    """Returns the module inside of ``torch.compile`` and of what runs it on several devices.

    Args:
        module: a PyTorch module.
    """
    parallel = require_torch().nn.parallel
    wrappers = parallel.DataParallel, parallel.DistributedDataParallel
    while "_orig_mod" in module._modules or isinstance(module, wrappers):
        module = module._modules.get("_orig_mod") or module.module
    return module


def check_reference(module: Any) -> None:
    """Requires a module whose operators can be seen, and that can be copied.

    Raises:
        UsageError: it was scripted, or has parameters without numbers, or holds what it computed of
            its parameters.
    """
    torch = require_torch()
    for path, inner in module.named_modules():
        where = path or "the reference"
        if isinstance(inner, torch.jit.ScriptModule):
            raise UsageError(
                f"{where} was made by torch.jit, which hides its operators: give the module that "
                "was scripted or traced"
            )
        for name, parameter in (*inner._parameters.items(), *inner._buffers.items()):
            if torch.nn.parameter.is_lazy(parameter):
                raise UsageError(
                    f"{name} of {where}, a {type(inner).__name__}, has no numbers yet: call the "
                    "reference on the inputs once, then copy its parameters to the candidate"
                )
        for name in computed_attributes(inner):
            if not _is_computed_again(inner):
                raise UsageError(
                    f"{name} of {where} was computed of parameters when the module was made, and "
                    "PyTorch copies no such module: compute it in forward, or detach() it"
                )


def computed_attributes(module: Any) -> dict[str, Any]:
    """Returns the tensors of a module, by attribute, through which gradients flow to others."""
    torch = require_torch()
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor) and not value.is_leaf
    }


def _is_computed_again(module: Any) -> bool:
    """Returns whether each call of a module computes its weight, as ``weight_norm`` makes it do."""
    hooks = module._forward_pre_hooks.values()
    return any(type(hook).__module__.startswith("torch.nn.utils.") for hook in hooks)
