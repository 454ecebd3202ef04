"""Stages: what most parametrizations derive from, who write a formula on one array and no code on trees."""
