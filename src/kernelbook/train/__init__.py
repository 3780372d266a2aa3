"""Training with a sparse backward pass: data, schedulers, an optimizer, and the loop."""

from kernelbook.train.chunks import (
    Layout,
    chunk_norms,
    chunk_norms_reference,
    knn_scores,
    knn_scores_reference,
    top_chunks,
    top_chunks_reference,
)
from kernelbook.train.loop import CONFIGS, TrainConfig, Trainer, make_data
from kernelbook.train.optimizer import ChunkAdamW
from kernelbook.train.schedulers import SCHEDULERS, Scheduler, make_scheduler, weight_features
from kernelbook.train.step import CapturedStep
from kernelbook.train.synthetic import PlantedTeacher, score_chunks, score_scheduler
from kernelbook.train.text import Corpus, TextData, book_encoding

__all__ = [
    "CONFIGS",
    "SCHEDULERS",
    "CapturedStep",
    "ChunkAdamW",
    "Corpus",
    "Layout",
    "PlantedTeacher",
    "Scheduler",
    "TextData",
    "TrainConfig",
    "Trainer",
    "book_encoding",
    "chunk_norms",
    "chunk_norms_reference",
    "knn_scores",
    "knn_scores_reference",
    "make_data",
    "make_scheduler",
    "score_chunks",
    "score_scheduler",
    "top_chunks",
    "top_chunks_reference",
    "weight_features",
]
