"""Detections of a network with anchors: boxes are decoded, and non-maximum suppression selects some of them.

Source: LiteRT, tflite/kernels/detection_postprocess.cc; equal scores are taken in the order of boxes and classes.
"""

from typing import Any

import torch
from torch import Tensor

from chipfit.errors import DataError


def post_process(
    boxes: Tensor, scores: Tensor, anchors: Tensor, *, num_classes: int, use_regular_nms: bool, **options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return corners, classes and scores of the detections in each sample, and their number.

    Args:
        boxes: center y and x relative to the anchor, and logarithms of height and width; [N, B, 4 or more].
        scores: [N, B, classes], after that of the background if there is one more than `num_classes`.
        anchors: center y and x, height and width; [B, 4].
        use_regular_nms: suppress boxes of each class by itself; else by the highest score of each box.

    Returns:
        [N, D, 4] as (ymin, xmin, ymax, xmax), [N, D], [N, D] and [N], with 0 behind the last detection.
    """
    if not 0 <= scores.shape[-1] - num_classes <= 1:
        raise DataError(
            "Scores do not fit the classes", got=f"{scores.shape[-1]} scores", allowed=f"{num_classes} (+ 1)"
        )
    corners, scores = _decode(boxes, anchors, options), scores[..., scores.shape[-1] - num_classes :]
    select = _by_class if use_regular_nms else _by_box
    found = [select(c, s, **options) for c, s in zip(corners, scores, strict=True)]
    size = options["max_detections"] * (1 if use_regular_nms else options["max_classes_per_detection"])
    corners, classes, scores = (torch.stack([_filled(values[k], size) for values in found]) for k in range(3))
    return corners, classes, scores, torch.stack([values[3] for values in found])


def _decode(boxes: Tensor, anchors: Tensor, options: dict[str, Any]) -> Tensor:
    """Return corners [N, B, 4]."""
    scale = torch.tensor([options[f"{axis}_scale"] for axis in "yxhw"], dtype=torch.float64, device=boxes.device)
    parts, anchors = boxes[..., :4].double() / scale, anchors.double()
    center = (parts[..., :2] * anchors[:, 2:] + anchors[:, :2]).to(boxes.dtype)
    half = (0.5 * parts[..., 2:].exp() * anchors[:, 2:]).to(boxes.dtype)
    return torch.cat((center - half, center + half), -1)


def _filled(rows: Tensor, size: int) -> Tensor:
    return torch.cat((rows, rows.new_zeros(size - len(rows), *rows.shape[1:])))


def _suppress(corners: Tensor, scores: Tensor, most: int, options: dict[str, Any]) -> list[int]:
    """Return the boxes that overlap no better one too much, best first."""
    order = scores.sort(descending=True, stable=True).indices
    order = order[scores[order] >= options["nms_score_threshold"]]
    area = (corners[:, 2:] - corners[:, :2]).prod(-1)
    kept = list[int]()
    while len(order) and len(kept) < most:
        best, order = order[0], order[1:]
        kept.append(int(best))
        low = torch.maximum(corners[best, :2], corners[order, :2])
        shared = (torch.minimum(corners[best, 2:], corners[order, 2:]) - low).clamp_min(0).prod(-1)
        overlap = shared / (area[best] + area[order] - shared)
        apart = (area[best] <= 0) | (area[order] <= 0) | (overlap <= options["nms_iou_threshold"])
        order = order[apart]
    return kept


def _by_box(corners: Tensor, scores: Tensor, **options: Any) -> tuple[Tensor, ...]:
    each = min(options["max_classes_per_detection"], scores.shape[-1])
    values, classes = (t[:, :each] for t in scores.sort(descending=True, stable=True))
    kept = _suppress(corners, values[:, 0], options["max_detections"], options)
    gap = (0, options["max_classes_per_detection"] - each)
    values, classes = (torch.nn.functional.pad(t[kept], gap).flatten() for t in (values, classes.to(scores.dtype)))
    return (
        corners[kept].repeat_interleave(options["max_classes_per_detection"], 0),
        classes,
        values,
        scores.new_tensor(len(kept)),
    )


def _by_class(corners: Tensor, scores: Tensor, **options: Any) -> tuple[Tensor, ...]:
    most = options["max_detections"]
    each = min(options["detections_per_class"], most)
    kept = [(b, k) for k in range(scores.shape[-1]) for b in _suppress(corners, scores[:, k], each, options)]
    boxes, classes = torch.tensor(kept, dtype=torch.long, device=scores.device).reshape(-1, 2).T
    order = scores[boxes, classes].sort(descending=True, stable=True).indices[:most]
    boxes, classes = boxes[order], classes[order]
    return corners[boxes], classes.to(scores.dtype), scores[boxes, classes], scores.new_tensor(len(order))
