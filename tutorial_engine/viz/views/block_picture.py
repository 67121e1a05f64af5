"""One decoder layer as a dataflow, with the shapes that a run had.

Every shape and number is read from the model, its config or the tensors that are handed in.
"""

from tutorial_engine.model.batch import Batch
from tutorial_engine.model.decoder import CausalLM
from tutorial_engine.viz.drawing.picture import Picture
from tutorial_engine.viz.run.shape_walk import shape_walk
from tutorial_engine.viz.views.layer_sheet import LayerSheet
from tutorial_engine.viz.words import counted

# -- one layer ------------------------------------------------------------------------------------


def block_picture(model: CausalLM) -> Picture:
    """One decoder layer as a dataflow; every arrow has the shape that a run of the model had.

    The model may be on the meta device: only shapes are read.
    """
    config = model.config
    sheet = LayerSheet(config, recorded_shapes(model))
    return sheet.picture(
        f"The residual stream, {sheet.shapes['stream']}, runs straight through the layer; "
        f"attention ({config.num_attention_heads} query heads, {config.num_key_value_heads} K/V "
        f"heads, {config.head_dim} numbers each) and the MLP ({config.intermediate_size} numbers "
        f"wide) read it through a norm and add their result to it; after "
        f"{counted(config.num_hidden_layers, 'such layer')} come {config.vocab_size} logits."
    )


def recorded_shapes(model: CausalLM) -> dict[str, str]:
    """The shape of each tensor of the dataflow, recorded in one run; T is the number of tokens."""
    run = shape_walk(model, Batch.from_sequences([[0] * 3], device=model.device))
    steps = {step.name.strip().split(",")[0]: step for step in run}

    def went_in(name: str) -> str:
        return "[T" + steps[name].inputs.removeprefix("[3")

    def came_out(name: str) -> str:
        return "[T" + steps[name].output.removeprefix("[3")

    return {
        "ids": went_in("embed_tokens"),
        "stream": came_out("embed_tokens"),
        "attention.norm": came_out("input_layernorm"),
        "q": went_in("attention: q"),
        "k": went_in("attention: k and v"),
        "v": went_in("attention: k and v"),
        "q.turned": went_in("attention: q"),
        "k.turned": went_in("attention: k and v"),
        "mixed": came_out("attention: q"),
        "joined": went_in("o_proj"),
        "attention.out": came_out("o_proj"),
        "mlp.norm": came_out("post_attention_layernorm"),
        "mlp.half": came_out("act_fn"),
        "mlp.product": went_in("down_proj"),
        "mlp.out": came_out("down_proj"),
        "last": steps["lm_head"].inputs,
        "logits": steps["lm_head"].output,
    }
