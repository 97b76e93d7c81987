"""vLLM's entry point (group `vllm.general_plugins`): tells it of the drafter whose low-rank head stays two factors.

vLLM calls `register` in each of its processes once this package is installed beside it. Nothing of vLLM, of torch or of this
library is imported before that. The model is vllm_model.py.
"""

FACTORS_ARCHITECTURE = "SlimSpecLlamaForCausalLMEagle3"  # EAGLE-3 architectures must begin or end with "Eagle3"
MODEL = "specdraft.export.vllm_model:SlimSpecEagle3"


def register() -> None:
    """Register the architecture; any number of times."""
    from vllm import ModelRegistry

    if FACTORS_ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(FACTORS_ARCHITECTURE, MODEL)
