"""Lesson 1: rendezvous, point to point, every collective from send and receive.

Jupyter's kernel imports a package of this name as well and looks in it for `base_comm`. Both are
served: this package comes first on the path, and the other's submodules are found behind ours.
"""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
