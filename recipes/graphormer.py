"""Graphormer: a bias of path lengths and of the edges along them, made anew for each graph."""

from __future__ import annotations

from flashbias_convert.refused import refused

_CLASS = "modeling_graphormer.GraphormerMultiheadAttention"

recipe = refused(
    name="graphormer",
    title="Graphormer (its own repository, older versions of transformers)",
    classes=(
        "graphormer.modules.multihead_attention.MultiheadAttention",
        f"transformers.models.deprecated.graphormer.{_CLASS}",
        f"transformers.models.graphormer.{_CLASS}",
    ),
    library="torch",
    tested=">=2.11,<2.15",
    models="Graphormer",
    reason=(
        "each batch of graphs brings its own bias, a sum of embeddings of path lengths and of the "
        "edges along the paths, which is of full rank and reaches the attention as a dense tensor"
    ),
    with_what="classes of the same name",
)
