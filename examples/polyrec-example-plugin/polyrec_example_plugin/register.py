"""What Polyrec asks when --extra-ops or --extra-att names this plugin. Nothing heavy is imported here: what these functions
return is checked before the modules are."""

from __future__ import annotations

from polyrec.plugin_api import Plugin


def register_ops() -> Plugin:
    """--extra-ops example_ops."""
    return Plugin(modules=("polyrec_example_plugin.ops",), api=">=1.0,<2", requires=("torch>=2.9",))


def register_att() -> list[str]:
    """--extra-att example_att. A list of module names will do where there is nothing to check."""
    return ["polyrec_example_plugin.attention"]
