"""The reference model in int8: linear and convolution layers multiply 8-bit integers, all others stay in float32.

The kernels are torch's oneDNN kernels, so there is nothing to install, export or compile. Each call runs the network's
Python code, so branches that depend on data, other batch sizes and any modules work as in float32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_egeria.core.network.forwards import Forward, ForwardReplacements
from lightning_egeria.errors import UnsupportedError
from lightning_egeria.upstream.torch import (
    has_hooks,
    own_parameter,
    qconv,
    qconv_prepack,
    qlinear,
    qlinear_prepack,
)

_Kernel = Callable[[Tensor], Tensor | None]
_PIECE = 2**17  # numbers quantised at once: the intermediate result stays in the processor's cache


def has_layers(network: nn.Module) -> bool:
    """Whether a network has layers that could run in int8 on the CPU."""
    return any(isinstance(m, nn.Linear | nn.Conv2d) and _has_int8(m) for m in network.modules())


class Int8Layers:
    """Runs each `nn.Linear` and `nn.Conv2d` of a network in int8 by replacing its ``forward``.

    It quantises weights once, symmetrically, with one scale per output channel, and inputs at each call, to their own
    range. Results are float32. The modules keep their parameters, for code that reads ``linear.weight`` without calling
    ``linear`` (tied embeddings, `nn.MultiheadAttention`).

    These stay in float32: subclasses, parametrised weights, modules with hooks or a replaced ``forward``, grouped
    convolutions, padding other than zeros, and inputs that are not finite. So do layers without an `nn.Linear`, such as
    the input projection of `nn.MultiheadAttention` and recurrent layers.

    Args:
        network: on the CPU, in float32, in evaluation mode, without gradients. Its ``forward`` methods are replaced.

    Attributes:
        in_float32: why a layer ran in float32 although it should run in int8, by path; not where an input is not
            finite.
        ran: paths of the layers that ran in int8.

    Raises:
        UnsupportedError: if this build of torch has no int8 kernels, or ``network`` has no layer for them.
    """

    def __init__(self, network: nn.Module) -> None:
        layers = {p: m for p, m in network.named_modules() if isinstance(m, nn.Linear | nn.Conv2d) and _has_int8(m)}
        self.in_float32: dict[str, str] = {}
        self.ran: set[str] = set()
        if not layers:
            raise UnsupportedError("the network has no nn.Linear or nn.Conv2d that could run in int8 on the CPU")
        self._replacements = ForwardReplacements()
        try:
            for path, module in layers.items():
                kernel = _linear_kernel(module) if isinstance(module, nn.Linear) else _conv_kernel(module)
                self._replacements.replace(module, functools.partial(self._forward, path, kernel))
        except (AttributeError, NotImplementedError, RuntimeError) as error:
            self.restore()
            raise UnsupportedError(
                f"torch {torch.__version__} cannot run {type(module).__name__} in int8 on this machine: {error}"
            ) from error

    def restore(self) -> None:
        """Restore float32. Safe to call twice."""
        self._replacements.restore()

    def describe(self) -> str | None:
        """Return which layers ran in float32, and why; None if all ran in int8."""
        if not self.in_float32:
            return None
        path, reason = next(iter(self.in_float32.items()))
        count = len(self.in_float32)
        total = len(self.in_float32.keys() | self.ran)
        return f"{count} of {total} layers run in float32 instead of int8, such as {path!r}: {reason}"

    def _forward(self, path: str, kernel: _Kernel, original: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            x = args[0] if len(args) == 1 and not kwargs else kwargs.get("input")
            if isinstance(x, Tensor) and x.dtype is torch.float32 and x.ndim >= 2 and x.numel():
                try:
                    result = kernel(x)
                except RuntimeError as error:  # the kernel does not take this shape, or is another one in this torch
                    self.in_float32[path] = str(error).partition("\n")[0]
                    return original(*args, **kwargs)
                if result is not None:
                    self.ran.add(path)
                    return result
            return original(*args, **kwargs)

        return forward


def _has_int8(module: nn.Linear | nn.Conv2d) -> bool:
    if isinstance(module, nn.Conv2d):
        plain = (
            type(module) is nn.Conv2d
            and module.groups == 1
            and module.padding_mode == "zeros"
            and not isinstance(module.padding, str)
        )
    else:
        plain = type(module) is nn.Linear
    weight = own_parameter(module, "weight")  # weight_norm and spectral_norm keep it elsewhere
    seen_by_others = has_hooks(module) or "forward" in vars(module)
    if not plain or seen_by_others or weight is None:
        return False
    return weight.dtype is torch.float32 and weight.device.type == "cpu"


def _quantized_input(x: Tensor) -> tuple[Tensor, float, int] | None:
    """Return ``x`` as 8-bit integers over its range, with scale and zero point; None if a value is not finite."""
    low, high = min(float(x.amin()), 0.0), max(float(x.amax()), 0.0)
    scale = (high - low) / (_input_steps() - 1)  # leaves one step for rounding the zero point
    if not 1e-30 < scale < math.inf:
        return None
    zero_point = round(-low / scale)
    offset = torch.tensor(zero_point + 0.5)  # the conversion to integers cuts off
    steps = torch.empty_like(x, dtype=torch.uint8)
    for source, target in zip(x.view(-1).split(_PIECE), steps.view(-1).split(_PIECE), strict=True):
        target.copy_(torch.add(offset, source, alpha=1 / scale))
    return steps, scale, zero_point


@functools.cache
def _input_steps() -> int:
    """Return the largest integer that an input may become: 255; 127 on x86 processors without VNNI.

    Their kernels add two products in 16 bits, and cut off the rest: 2 * 127 * 127 fits, 2 * 255 * 127 does not.
    """
    packed = qlinear_prepack(torch.full((64, 64), 127, dtype=torch.int8))
    largest = torch.full((16, 64), 255, dtype=torch.uint8)
    sums = qlinear(largest, 1.0, 0, packed, torch.ones(64), torch.zeros(64, dtype=torch.int32), None)
    return 255 if bool((sums == 64 * 255 * 127).all()) else 127


def _quantized_weight(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weight as 8-bit integers, with scale and zero point of each output channel."""
    rows = weight.detach().flatten(1)
    scales = (rows.abs().amax(1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    steps = (rows / scales[:, None]).round().to(torch.int8).view_as(weight)
    return steps, scales, torch.zeros(len(rows), dtype=torch.int32)


def _linear_kernel(module: nn.Linear) -> _Kernel:
    weight, scales, zero_points = _quantized_weight(module.weight)
    packed = qlinear_prepack(weight)

    def kernel(x: Tensor) -> Tensor | None:
        quantized = _quantized_input(x.contiguous())
        if quantized is None:
            return None
        return qlinear(*quantized, packed, scales, zero_points, module.bias)

    return kernel


def _conv_kernel(module: nn.Conv2d) -> _Kernel:
    weight, scales, zero_points = _quantized_weight(module.weight)
    geometry = list(module.stride), list(module.padding), list(module.dilation), module.groups
    packed = qconv_prepack(weight, scales, geometry)

    def kernel(x: Tensor) -> Tensor | None:
        # oneDNN needs channels last. That view is contiguous, and a pass over it is several times faster.
        if x.ndim != 4:
            raise RuntimeError(f"the kernel takes four dimensions, not {x.ndim}")
        quantized = _quantized_input(x.permute(0, 2, 3, 1).contiguous())
        if quantized is None:
            return None
        steps, scale, zero_point = quantized
        steps = steps.permute(0, 3, 1, 2)
        return qconv(steps, scale, zero_point, packed, scales, zero_points, module.bias, geometry)

    return kernel
