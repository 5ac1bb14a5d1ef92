"""The agents that `ft launch` knows."""

from ftproviders.base import AgentPlan, Endpoint, LaunchOptions, Provider
from ftproviders.registry import PROVIDERS

__all__ = ["PROVIDERS", "AgentPlan", "Endpoint", "LaunchOptions", "Provider"]
