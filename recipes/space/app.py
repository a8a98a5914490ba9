r"""A Space for task vectors: give a base and what was made from it, look at the change, try λ, merge from Hub to Hub.

    python recipes/space/app.py                       # as on a Space: Hub ids only
    python recipes/space/app.py --play outputs/space  # on tiny models, made in half a minute (`make space`)

1. Headers are compared, and sizes, disk, memory and time told, before any weight is read.
2. The vectors: norms, stable ranks and cosines by layer.
3. λ moves, and two answers stand side by side: of the untouched model, and of the edited one.
4. The card of what would be pushed; the push, with the visitor's own token. The token is in no file, log or session: it
   goes from the field to the push, and the field is emptied.

What is computed is in `steps.py`; here is only what a visitor sees.
"""

import argparse
import io
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import gradio as gr
import steps
from PIL import Image

from hf_taskvec.errors import TaskVectorError
from hf_taskvec.figures import render

_HEAD = """# Task vectors

What did fine-tuning change? A task vector is that change: `τ = θ_fine-tuned − θ_base`. Add it and a model gains a
skill, subtract it and it loses one. Subtracting a vector lowers a model's performance on a task; it is no proof that
the data cannot be extracted by other means, and it can cost other abilities."""
_LIVE = steps.LiveModel()


def told(step: Callable[..., Any]) -> Callable[..., Any]:
    """An error of ours is a message for the visitor, not a traceback; what is given is in no log."""

    @wraps(step)
    def run(*given: Any) -> Any:
        try:
            return step(*given)
        except TaskVectorError as error:
            raise gr.Error(str(error), duration=None, print_exception=False) from None

    return run


def opened(state: "steps.Opened | None") -> "steps.Opened":
    """What the first step left, which the others need."""
    if state is None:
        raise gr.Error("Compare the headers first.", print_exception=False)
    return state


def make_app(folders: bool = False, base: str = "", tuned: str = "", prompt: str = "The") -> gr.Blocks:
    """The page.

    Args:
        folders (`bool`, *optional*, defaults to `False`):
            Whether folders of this machine are taken, too: for oneself alone.
        base (`str`, *optional*):
            What the field for the base holds in the beginning.
        tuned (`str`, *optional*):
            The same of the field for what was made from it.
        prompt (`str`, *optional*):
            The same of the prompt's.

    Returns:
        `gradio.Blocks`: To be launched.
    """

    @told
    def compare(base: str, tuned: str) -> tuple[Any, ...]:
        found = steps.compare_headers(base, tuned, folders)
        return found, found.text, found.expression, None, [], ""

    @told
    def look(state: Any) -> tuple[Any, ...]:
        found = steps.extract(opened(state))
        head, rows, figures = steps.look_at(found)
        return found, gr.update(value=rows, headers=head, visible=True), *_plots(figures)

    @told
    def answer(state: Any, expression: str, prompt: str, scale: float, words: float) -> tuple[str, str]:
        return _LIVE.answers(opened(state), expression, prompt, scale, int(words))

    @told
    def show_card(state: Any, expression: str, scale: float, product: Any, repo: str, purpose: str) -> str:
        return steps.card(opened(state), expression, scale, product, repo, purpose)

    @told
    def send(
        state: Any, expression: str, scale: float, product: Any, repo: str, purpose: str, private: bool, token: str
    ) -> str:
        done = steps.push(opened(state), expression, scale, product, repo, purpose, private, token)
        return f"{'Pushed' if done.changed else 'The Hub had all of it already'}: {done.url}"

    with gr.Blocks(title="Task vectors", analytics_enabled=False) as page:
        state: Any = gr.State(None)
        gr.Markdown(_HEAD)
        gr.Markdown("## 1. Which models?")
        base_field = gr.Textbox(base, label="Base", placeholder="HuggingFaceTB/SmolLM2-135M", elem_id="base")
        tuned_field = gr.Textbox(
            tuned,
            lines=3,
            label="Fine-tunes, LoRA adapters or saved task vectors: one a line",
            info="Public ones. For adapters the base may be left out.",
            placeholder="HuggingFaceTB/SmolLM2-135M-Instruct",
            elem_id="tuned",
        )
        compare_button = gr.Button("Compare the headers", variant="primary", elem_id="compare")
        headers = gr.Markdown(elem_id="headers")
        gr.Markdown("## 2. What was changed?")
        look_button = gr.Button("Extract and look", elem_id="look")
        table = gr.Dataframe(interactive=False, visible=False, elem_id="layers", label="By layer")
        plots = [
            gr.Image(visible=False, show_label=False, format="png", buttons=["download"])
            for _ in range(steps.MOST_VECTORS + 1)
        ]
        gr.Markdown("## 3. Which λ?")
        expression = gr.Textbox(
            label="Expression",
            info="Of the vectors' names; for instance `-0.6*one + 0.2*two`",
            elem_id="expression",
        )
        prompt_field = gr.Textbox(prompt, label="The beginning of a text", lines=2, elem_id="prompt")
        scale = gr.Slider(-2, 2, value=-0.5, step=0.1, label="λ", elem_id="scale")
        words = gr.Slider(8, 64, value=24, step=8, label="New tokens", elem_id="words")
        answer_button = gr.Button("Answer", elem_id="answer")
        with gr.Row():
            before = gr.Textbox(label="λ = 0: the model as it is", lines=6, elem_id="before")
            after = gr.Textbox(label="with the edit at λ", lines=6, elem_id="after")
        gr.Markdown("## 4. Share it")
        product = gr.Radio(list(steps.PRODUCTS), value=steps.PRODUCTS[0], label="Push", elem_id="product")
        repo = gr.Textbox(label="To", placeholder="me/model", elem_id="repo")
        purpose = gr.Textbox(label="What it is for, on its card", elem_id="purpose")
        private = gr.Checkbox(True, label="Private", elem_id="private")
        card_button = gr.Button("Show the card", elem_id="card-button")
        card = gr.Code(language="markdown", label="README.md", lines=6, max_lines=24, elem_id="card")
        token = gr.Textbox(
            type="password",
            label="Your token",
            info="It may write to that repository. It is used for this push, and kept nowhere.",
            elem_id="token",
        )
        push_button = gr.Button("Push", variant="primary", elem_id="push")
        pushed = gr.Markdown(elem_id="pushed")

        # One after another: there are two cores, and one model in memory. Nothing is an endpoint for programs.
        alone: Any = {"concurrency_id": "one", "concurrency_limit": 1, "api_visibility": "private"}
        emptied = [state, headers, expression, card, table, pushed]
        compare_button.click(compare, [base_field, tuned_field], emptied, **alone)
        look_button.click(look, [state], [state, table, *plots], **alone)
        asked = [state, expression, prompt_field, scale, words]
        answer_button.click(answer, asked, [before, after], **alone)
        scale.change(answer, asked, [before, after], trigger_mode="always_last", show_progress="minimal", **alone)
        told_of = [state, expression, scale, product, repo, purpose]
        card_button.click(show_card, told_of, card, **alone)
        pushing = push_button.click(send, [*told_of, private, token], pushed, **alone)
        pushing.then(lambda: "", None, token, queue=False, api_visibility="private")
    return page


def _plots(figures: list[Any]) -> list[Any]:
    empty = [gr.update(value=None, visible=False)] * (steps.MOST_VECTORS + 1 - len(figures))
    pictures = render({str(number): each for number, each in enumerate(figures)})
    shown = [Image.open(io.BytesIO(pictures[f"{number}.png"])) for number in range(len(figures))]
    return [gr.update(value=each, visible=True) for each in shown] + empty


def main() -> None:
    """Serve the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--play", type=Path, help="a folder for tiny models; they are made if they are not there")
    parser.add_argument("--port", type=int, help="on this machine; by default the first that is free from 7860 on")
    parser.add_argument("--folders", action="store_true", help="take folders of this machine, too: for yourself alone")
    options = parser.parse_args()
    given: dict[str, Any] = {"folders": options.folders}
    if options.play is not None:
        from hf_taskvec.experiments.playground import make_playground

        made = make_playground(options.play)
        adapters = "\n".join(map(str, (made.adapter, made.adapter_2)))
        given = {"folders": True, "base": str(made.base), "tuned": adapters, "prompt": "The clock"}
    # System fonts: a page that asks nobody else for anything.
    theme = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    make_app(**given).queue().launch(server_port=options.port, theme=theme, footer_links=[])


if __name__ == "__main__":
    main()
