"""Papers, threads and files of other engines: one table of addresses, and text with links to them.

The lessons and documents of the site go through `linked`, so that what they name can be opened.
The files are those of the versions that the lessons read. Knows text; knows no page.
"""

import re

from tutorial_engine.learn.stories.vllm_places import SOURCE

GITHUB = "https://github.com"
VLLM, LLAMA = f"{GITHUB}/vllm-project/vllm", f"{GITHUB}/ggml-org/llama.cpp/blob/b10970"
TRANSFORMERS = f"{GITHUB}/huggingface/transformers/blob/v5.23.0"
# How a file's path begins → what its address begins with.
TREES = {
    "vllm/": SOURCE,
    "python/sglang/": f"{GITHUB}/sgl-project/sglang/blob/v0.5.19/",
    "src/llama-": f"{LLAMA}/",
    "tools/server/": f"{LLAMA}/",
    "common/": f"{LLAMA}/",
    "ggml/": f"{LLAMA}/",
    "nanovllm/": f"{GITHUB}/GeeeekExplorer/nano-vllm/blob/main/",
    "src/transformers/": f"{TRANSFORMERS}/",
    "generation/": f"{TRANSFORMERS}/src/transformers/",
    "integrations/": f"{TRANSFORMERS}/src/transformers/",
}
THREADS = {  # number of a pull request → its address
    "37307": f"{VLLM}/pull/37307",
    "42656": f"{VLLM}/pull/42656",
    "44455": f"{VLLM}/pull/44455",
    "46384": f"{VLLM}/pull/46384",
    "52216": f"{VLLM}/pull/52216",
    "51718": f"{VLLM}/pull/51718",
    "35081": f"{GITHUB}/sgl-project/sglang/pull/35081",
    "16736": f"{GITHUB}/ggml-org/llama.cpp/pull/16736",
}
# Words → the paper that they come from. The first mention in a text becomes a link.
PAPERS = {
    "continuous batching": "https://www.usenix.org/conference/osdi22/presentation/yu",
    "pagedattention": "https://arxiv.org/abs/2309.06180",
    "flashattention": "https://arxiv.org/abs/2205.14135",
    "radixattention": "https://arxiv.org/abs/2312.07104",
    "speculative decoding": "https://arxiv.org/abs/2211.17192",
    "chunked prefill": "https://arxiv.org/abs/2403.02310",
    "running softmax": "https://arxiv.org/abs/1805.02867",
    "grouped-query attention": "https://arxiv.org/abs/2305.13245",
    "induction heads": "https://arxiv.org/abs/2209.11895",
    "tensor parallelism": "https://arxiv.org/abs/1909.08053",
}
# Where nothing is put in: blocks of code, headings, tags, links, other code.
KEPT = r"^```.*?^```$|^#.*?$|<a\b.*?</a>|<[^>]*>|!?\[[^\]]*\](?:\([^)]*\))?"
FILE = rf"(?:{'|'.join(map(re.escape, TREES))})[\w./-]+\.(?:py|h|cpp|cu)\b"
PIECE = re.compile(
    rf"(?P<kept>{KEPT})|(?<![\w/])(?P<tick>`?)(?P<file>{FILE})(?P=tick)|`[^`\n]*`"
    rf"|\bpull\s+request\s+(?P<thread>\d+)|(?P<paper>\b(?:{'|'.join(map(re.escape, PAPERS))})\b)",
    re.M | re.S | re.I,
)


def linked(text: str, known: set[str] | None = None) -> str:
    """Markdown, or HTML that stands in it, with links to the files, threads and papers it names.

    `known`: papers that are linked already; those of this text are added. KeyError for a pull
    request that is not in the table.
    """
    known = set() if known is None else known
    known |= {address for address in PAPERS.values() if address in text}

    def link(match: re.Match[str]) -> str:
        words, goal = match[0], None
        if path := match["file"]:
            goal = next(f"{tree}{path}" for start, tree in TREES.items() if path.startswith(start))
            words = f"<code>{path}</code>"
        elif match["thread"]:
            goal = THREADS[match["thread"]]
        elif match["paper"]:
            goal = PAPERS[words.lower()]
            if goal in known:
                return words
            known.add(goal)
        return f'<a href="{goal}">{words}</a>' if goal else words

    return PIECE.sub(link, text)
