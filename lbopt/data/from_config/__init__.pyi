from ._known import has_known_length as has_known_length, known_source as known_source
from ._source import Source as Source, load_source as load_source
from ._text import Learned as Learned
