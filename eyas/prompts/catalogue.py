"""The eight datasets of the reference run, as data: names, hub ids, converters, quotas, caps, licences.

From the reference run come the names B1_glaive to B8_sweagent, the caps (10,240 tokens; B8 16,384) and
the sum of 88,088 prompts. Which public dataset stands behind B2 to B7 and how the sum is shared out is
this project's choice. Licences are the words of the datasets' own pages (read in December 2026); read them again before
you publish a draft.
"""

from __future__ import annotations

from eyas.prompts.config import DatasetConfig

NUM_PROMPTS = 88_088

REFERENCE_DATASETS: tuple[DatasetConfig, ...] = (
    DatasetConfig(
        name="B1_glaive",
        source="hub:glaiveai/glaive-function-calling-v2",
        converter="glaive",
        quota=11_000,
        max_rows=60_000,
        license="Apache-2.0",
    ),
    DatasetConfig(
        name="B2_opencodeinstruct",
        source="hub:nvidia/OpenCodeInstruct",
        converter="prompt",
        fields={"prompt": "input"},
        quota=14_000,
        max_rows=60_000,
        license="CC-BY-4.0",
    ),
    DatasetConfig(
        name="B3_magicoder",
        source="hub:ise-uiuc/Magicoder-OSS-Instruct-75K",
        converter="prompt",
        fields={"prompt": "problem"},
        quota=12_000,
        license="MIT",
    ),
    DatasetConfig(
        name="B4_mixturethoughts",
        source="hub:open-r1/Mixture-of-Thoughts",
        subset="all",
        converter="messages",
        quota=13_000,
        max_rows=60_000,
        license="none stated (asked in huggingface/open-r1 issue 702); sources have their own",
    ),
    DatasetConfig(
        name="B5_openthoughts",
        source="hub:open-thoughts/OpenThoughts-114k",
        converter="sharegpt",
        fields={"conversations": "conversations"},  # leaves out a system column that prescribes another model's think tags
        quota=13_000,
        max_rows=60_000,
        license="Apache-2.0",
    ),
    DatasetConfig(
        name="B6_ultrachat",
        source="hub:HuggingFaceH4/ultrachat_200k",
        split="train_sft",
        converter="messages",
        quota=13_000,
        max_rows=60_000,
        license="MIT",
    ),
    DatasetConfig(
        name="B7_sharegpt",
        source="hub:Aeala/ShareGPT_Vicuna_unfiltered",
        converter="sharegpt",
        quota=10_000,
        max_rows=60_000,
        license="Apache-2.0",
    ),
    DatasetConfig(
        name="B8_sweagent",
        source="hub:nebius/SWE-agent-trajectories",
        converter="swe-agent",
        quota=2_088,
        max_rows=12_000,
        max_new_tokens=16_384,
        license="CC-BY-4.0",
    ),
)
"""In order of precedence for duplicates: tools and code before general chat."""
