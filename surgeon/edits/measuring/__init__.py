"""Measurements that edits make by running a base: modules that import torch."""
