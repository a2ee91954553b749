"""Checks a task on a few outputs before anything starts."""

import torch
from torch.utils._pytree import tree_map

from rayfl.errors import RayflError, one_line, plugin_line
from rayfl.metrics.base import Metric
from rayfl.settings import shown
from rayfl.tasks.base import Task
from rayfl.untyped import Outputs


def check_task(task: Task, outputs: Outputs, targets: torch.Tensor) -> None:
    """Raise RayflError unless the task gives a loss, a count and a score for each example, float [batch], scores
    from 0 to 1."""
    what = f"task {task.name!r}, given outputs {shapes(outputs)} and labels {list(targets.shape)},"
    expected = list(targets.shape[:1])
    try:
        result = torch.enable_grad()(task.loss)(tree_map(_differentiable, outputs), targets)
        if not isinstance(result, tuple):
            raise TypeError(f"loss returns a {type(result).__name__}, and not sums and counts")
        sums, counts = result
        if not sums.requires_grad:
            raise TypeError("the losses have no gradient in the outputs, so that nothing can be learned")
        numbers = {"losses": sums, "counts": counts, "scores": task.score(outputs, targets)}
        wrong = [
            name for name, tensor in numbers.items() if list(tensor.shape) != expected or not tensor.is_floating_point()
        ]
        outside = [] if wrong else [score for score in numbers["scores"].tolist() if not 0 <= score <= 1]
        metrics = task.default_metrics()
    except (KeyboardInterrupt, RayflError):
        raise
    except BaseException as error:
        fault = f"raises {type(error).__name__}: {error}{plugin_line(error)}"
        raise RayflError(one_line(f"{what} {fault}; it must give sums, counts and scores {expected}")) from error
    if wrong:
        actual = f"{numbers[wrong[0]].dtype} {list(numbers[wrong[0]].shape)}"
        raise RayflError(
            f"{what} gives {wrong[0]} {actual}; give floating-point numbers {expected}, one for each example"
        )
    if outside:
        raise RayflError(f"{what} gives a score of {outside[0]:g}; give numbers from 0 to 1, where 1 is best")
    if not metrics or not all(isinstance(metric, Metric) for metric in metrics):
        raise RayflError(
            f"task {task.name!r} has default_metrics {shown(metrics)}; give objects such as rayfl.metrics.loss.Loss(), "
            "at least one"
        )


def shapes(outputs: Outputs) -> Outputs:
    """The shapes of a network's outputs, nested as they are; types of what is no tensor."""
    return tree_map(lambda leaf: [*leaf.shape] if isinstance(leaf, torch.Tensor) else type(leaf).__name__, outputs)


def _differentiable(output: Outputs) -> Outputs:
    return output.detach().requires_grad_() if output.is_floating_point() else output
