"""Shards and indexes, on disks and in object stores."""
