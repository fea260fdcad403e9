"""The handle of the current stream, from torch's getter of handles or from its stream objects."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvant.ops.streams import stream_handle


@pytest.mark.parametrize("bare", [True, False])
def test_handle_of_the_current_stream(bare: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the device that is asked for; a device without a number is the current one."""
    asked = list[object]()
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: asked.append(device) or SimpleNamespace(cuda_stream=7)
    )
    if bare:
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 40 + index, raising=False)
    else:
        monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream", raising=False)
    assert stream_handle(torch.device("cpu")) == 0 and not asked
    assert stream_handle(torch.device("cuda", 1)) == (41 if bare else 7)
    assert stream_handle(torch.device("cuda")) == 7
    assert asked == ([] if bare else [torch.device("cuda", 1)]) + [torch.device("cuda")]
