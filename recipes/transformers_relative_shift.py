"""Positions as in Transformer-XL: products of each query with an embedding of the distance."""

from __future__ import annotations

from flashbias_convert.recipe import Site
from flashbias_convert.refused import refused


def has_positions(site: Site) -> bool:
    """Some of the classes have other kinds of positions, too, or none."""
    module = site.module
    if hasattr(module, "position_embeddings_type"):
        return str(module.position_embeddings_type).startswith("relative")
    if hasattr(module, "emb_rel_k") or type(module).__name__ == "VitsAttention":
        return bool(getattr(module, "window_size", None))
    if type(module).__name__ == "SpeechT5Attention":
        return type(site.parent).__name__ == "SpeechT5EncoderLayer"
    return True


recipe = refused(
    name="transformers_relative_shift",
    title="Relative shift: XLNet, Funnel, Conformers (transformers)",
    classes=(
        "transformers.models.fastspeech2_conformer.modeling_fastspeech2_conformer.FastSpeech2ConformerAttention",
        "transformers.models.funnel.modeling_funnel.FunnelRelMultiheadAttention",
        "transformers.models.gemma3n.modeling_gemma3n.Gemma3nAudioAttention",
        "transformers.models.gemma4.modeling_gemma4.Gemma4AudioAttention",
        "transformers.models.granite_speech.modeling_granite_speech.GraniteSpeechConformerAttention",
        "transformers.models.granite_speech5.modeling_granite_speech5.GraniteSpeech5EncoderAttention",
        "transformers.models.granite_speech_plus.modeling_granite_speech_plus.GraniteSpeechPlusConformerAttention",
        "transformers.models.nemotron_asr_streaming.modeling_nemotron_asr_streaming.NemotronAsrStreamingEncoderAttention",
        "transformers.models.parakeet.modeling_parakeet.ParakeetEncoderAttention",
        "transformers.models.seamless_m4t.modeling_seamless_m4t.SeamlessM4TConformerSelfAttention",
        "transformers.models.seamless_m4t_v2.modeling_seamless_m4t_v2.SeamlessM4Tv2ConformerSelfAttention",
        "transformers.models.speecht5.modeling_speecht5.SpeechT5Attention",
        "transformers.models.vits.modeling_vits.VitsAttention",
        "transformers.models.wav2vec2_bert.modeling_wav2vec2_bert.Wav2Vec2BertSelfAttention",
        "transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer.Wav2Vec2ConformerSelfAttention",
        "transformers.models.xlnet.modeling_xlnet.XLNetRelativeAttention",
    ),
    library="transformers",
    tested=">=5.16,<5.25",
    models=(
        "XLNet, Funnel, VITS, SpeechT5, and the Conformers of Wav2Vec2, SeamlessM4T, FastSpeech 2, "
        "Parakeet, Nemotron, Granite Speech, Gemma"
    ),
    reason=(
        "it adds products of each query with an embedding of the distance (relative "
        "shift): each call has another bias, which is of full rank"
    ),
    when=has_positions,
)
