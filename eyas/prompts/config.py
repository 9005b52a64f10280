"""Which datasets a run draws prompts from, and what is kept of them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from eyas.settings import Settings


class DatasetConfig(Settings):
    """One dataset: where its rows are, how they become conversations, how many are wanted."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$", description="Folder name of the dataset in the run.")
    source: str = Field(
        description="file:PATH (JSONL, JSON, Parquet, CSV, compressed; a file or a folder), hub:ID, or package:NAME."
    )
    split: str = Field(default="train", description="Split of a hub dataset.")
    subset: str = Field(default="", description="Configuration name of a hub dataset.")
    revision: str = Field(default="", description="Revision of a hub dataset; part of the fingerprint.")
    converter: Literal["auto", "messages", "sharegpt", "alpaca", "prompt", "glaive", "swe-agent", "bfcl"] = Field(
        default="auto", description="Name of the converter; auto takes the package source's own, or recognises the row's shape."
    )
    max_rows: int = Field(default=0, ge=0, description="Rows read from the source; 0 reads all.")
    fields: dict[str, str] = Field(
        default_factory=dict, description='Field mapping, wanted name to the row\'s name: `{"messages": "dialogue"}`.'
    )
    quota: int = Field(default=0, ge=0, description="Prompts wanted; 0 keeps all.")
    max_new_tokens: int = Field(default=10_240, ge=2, description="Cap of one response, in tokens.")
    license: str = Field(default="", description="Licence note, carried into manifests and model card.")
    tools: Literal["auto", "native", "text"] = Field(
        default="auto",
        description="Tools through the chat template (native) or written into the system turn (text); "
        "auto takes native where the template renders them.",
    )
    every_turn: bool = Field(default=False, description="True makes a prompt of each earlier assistant turn as well.")


class PromptsConfig(Settings):
    """Phase 1: selection, cleaning and split of prompts."""

    datasets: list[DatasetConfig] = Field(default_factory=list, description="The datasets, in order of precedence for duplicates.")
    heldout_share: float = Field(default=0.05, ge=0, lt=1, description="Share of conversations kept out of training.")
    subsample: float = Field(default=1.0, gt=0, le=1, description="Share of every dataset that is kept, stratified.")
    seed: int = Field(default=0, ge=0, description="Decides which prompts a quota or a subsample keeps.")
    max_row_bytes: int = Field(
        default=16 * 2**20, ge=1024, description="Largest row of a source, in bytes; a larger one is rejected."
    )
    max_prompt_tokens: int = Field(default=0, ge=0, description="Longest prompt; 0 leaves room for a response in the context.")
    min_prompt_tokens: int = Field(default=0, ge=0, description="Shortest prompt; shorter ones are filtered out, 0 keeps all.")
    min_response_room: int = Field(default=64, ge=2, description="Tokens of context that must remain for a response.")
    same_role_turns: Literal["merge", "reject"] = Field(
        default="merge", description="What becomes of consecutive turns of one role."
    )
    control_tokens: Literal["reject", "keep"] = Field(
        default="reject",
        description="What becomes of a prompt whose own text spells a control token of the target (such as <|im_end|>).",
    )
    near_duplicates: bool = Field(default=True, description="True removes near-duplicates by MinHash, across datasets.")
    near_duplicate_threshold: float = Field(
        default=0.8, gt=0, le=1, description="Jaccard similarity from which two prompts are duplicates."
    )
    decontaminate_against: list[str] = Field(
        default_factory=lambda: ["package:mt-bench", "package:humaneval"],
        description="Benchmark sets whose prompts must not be trained on.",
    )
    contamination_ngram: int = Field(default=13, ge=3, description="Words of an n-gram whose presence means contamination.")
    languages: list[str] = Field(default_factory=list, description="Keep only these languages (ISO 639-1); empty keeps all.")
    reject_limit: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Share of unusable rows of a dataset above which the stage exits with 3; "
        "duplicates, contamination, languages, short prompts and quotas do not count.",
    )

    @model_validator(mode="after")
    def _names_are_unique(self) -> PromptsConfig:
        names = [dataset.name for dataset in self.datasets]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ValueError(f"dataset names must be unique, these stand twice: {', '.join(doubled)}")
        return self
