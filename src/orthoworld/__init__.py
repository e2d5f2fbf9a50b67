"""orthoworld: when does an encoder learn the state of a world, and how far is yours from it?

The public names are listed in the stub beside this file and imported when they are first used, so that
`orthoworld --help` does not wait for torch.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
