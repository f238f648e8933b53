"""The group of the viewer benchmark in Gradio. Runs in Gradio's own environment: `python _gradio_app.py DATA PORT`.

As few parts as the task allows, in Gradio's favour: one HighlightedText per response with its influence (our page
draws entropy beside it), a click on a token fills one HTML table, a button per response repaints all of them.
"""

import sys

import gradio as gr
import numpy as np

data = np.load(sys.argv[1])
TEXTS = data["texts"].tolist()
RESPONSES, TOKENS = data["token"].shape
TOP = float(np.quantile(np.abs(data["influence"]), 0.99))


def highlighted(values):
    """[(text, score)] per response; four decimals, as Gradio sends numbers as text."""
    scaled = np.clip(values / TOP, -1, 1).round(4)
    return [
        [(TEXTS[token], score) for token, score in zip(data["token"][r].tolist(), scaled[r].tolist(), strict=True)]
        for r in range(RESPONSES)
    ]


def effects_table(response, position):
    effects = data["pairwise"][response, position]
    rows = "".join(f"<tr><td>r{r}</td><td>{value:+.4f}</td></tr>" for r, value in enumerate(effects))
    return f"<p id='shown'>r{response}, position {position}</p><table>{rows}</table>"


with gr.Blocks() as app:
    table = gr.HTML("<p id='shown'>nothing</p>", elem_id="effects")
    target = gr.HTML("<p id='target'>all</p>")
    parts = []
    buttons = []
    for r, value in enumerate(highlighted(data["influence"])):
        buttons.append(gr.Button(f"r{r}", elem_id=f"button-{r}"))
        parts.append(
            gr.HighlightedText(value, label=f"r{r}", elem_id=f"response-{r}", combine_adjacent=False, show_legend=False)
        )

    for r, part in enumerate(parts):

        def on_select(event: gr.SelectData, r=r):
            return effects_table(r, event.index if isinstance(event.index, int) else event.index[0])

        part.select(on_select, None, table, show_progress="hidden", queue=False)
    for r, button in enumerate(buttons):

        def on_click(r=r):
            return [f"<p id='target'>r{r}</p>", *highlighted(data["pairwise"][:, :, r])]

        button.click(on_click, None, [target, *parts], show_progress="hidden", queue=False)

app.launch(server_name="127.0.0.1", server_port=int(sys.argv[2]), inbrowser=False, quiet=True, ssr_mode=False)
