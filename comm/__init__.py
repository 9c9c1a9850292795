"""Lesson 1: find the other ranks, send and receive, and build every collective from these.

Jupyter's kernel imports `comm.base_comm` from another package that is also called `comm`. So the two packages
share the name: a submodule that is not found here is looked up in the other package.
"""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
