"""Plots of results. A result may hold a plot as a value: it is drawn into the output folder, and its file name takes its place."""
from __future__ import annotations

import contextlib
import dataclasses
import pathlib

LABELS = {"effective_bits": "effective bits an element (codes, scales, offsets, promoted channels)",
          "perplexity": "perplexity (teacher-forced through the cache)", "top1_agreement_pct": "top-1 agreement, %",
          "perplexity_increase_pct": "increase of perplexity over the 16-bit cache, %",
          "kl": "KL divergence from the 16-bit cache, nats a token"}


@contextlib.contextmanager
def drawing(path: pathlib.Path, *, size: tuple[float, float], dpi: int):
    """Axes of one figure, `size` in inches, which is written to `path` as PNG at the end. Needs no display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=size, layout="constrained")
    yield axes
    figure.savefig(path, dpi=dpi)
    pyplot.close(figure)


@dataclasses.dataclass(frozen=True)
class KLByPosition:
    """The key "kl_by_position" of each row, over a window of `context` tokens."""

    rows: list[dict]
    context: int

    def save(self, folder: pathlib.Path) -> str:
        """Writes a PNG and returns its name."""
        import matplotlib

        name = "kl_by_position.png"
        with drawing(folder / name, size=(7, 4.5), dpi=150) as axes:
            axes.set_prop_cycle(color=[matplotlib.colormaps["tab20"](i) for i in range(20)])
            for row in self.rows:
                values, step = row["kl_by_position"], self.context / len(row["kl_by_position"])
                if any(values):  # not the 16-bit cache itself
                    axes.plot([step * (i + 0.5) for i in range(len(values))], values, label=row["format"], linewidth=1)
            axes.set(yscale="log", xlabel="position in the window, tokens", ylabel=LABELS["kl"])
            if axes.get_lines():
                axes.legend(fontsize=6, loc="upper left", bbox_to_anchor=(1, 1))
            axes.grid(alpha=0.3)
        return name


@dataclasses.dataclass(frozen=True)
class Quality:
    """One labelled point a row: `x` against `y`, keys of the rows."""

    rows: list[dict]
    x: str
    y: str

    def save(self, folder: pathlib.Path) -> str:
        """Writes a PNG and returns its name."""
        name = f"{self.y}_by_{self.x}.png"
        with drawing(folder / name, size=(7, 4.5), dpi=150) as axes:
            points = sorted((row[self.x], row[self.y], row["format"]) for row in self.rows)
            axes.plot([p[0] for p in points], [p[1] for p in points], "o-", color="tab:blue")
            for x, y, label in points:
                axes.annotate(label, (x, y), textcoords="offset points", xytext=(6, 6))
            axes.set(xscale="log", xlabel=LABELS.get(self.x, self.x), ylabel=LABELS.get(self.y, self.y))
            ticks = [2, 3, 4, 6, 8, 16]
            axes.set_xticks(ticks, [str(t) for t in ticks])
            axes.minorticks_off()
            axes.margins(x=0.12, y=0.12)
            axes.grid(alpha=0.3)
        return name
