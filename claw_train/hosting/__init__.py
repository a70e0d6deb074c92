"""Runs episodes: environments on their own threads, driven from asyncio."""
