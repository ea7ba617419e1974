/* storage/records/_wire.pxd includes this name; the code is there, once. */
#include "../../storage/records/crc32c.h"
