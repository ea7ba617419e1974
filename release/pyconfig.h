/* What CPython's headers ask of a platform, for any 64-bit little-endian Linux.
 *
 * Python writes a pyconfig.h where it is built. Cross compiling for the limited API needs little of
 * it, and for the platforms of wheels.py that little is the same: the assertions below hold or
 * nothing compiles.
 */
#ifndef KEPT_PYCONFIG_H
#define KEPT_PYCONFIG_H

#define SIZEOF_SHORT 2
#define SIZEOF_INT 4
#define SIZEOF_LONG 8
#define SIZEOF_LONG_LONG 8
#define SIZEOF_VOID_P 8
#define SIZEOF_SIZE_T 8
#define SIZEOF_WCHAR_T 4
#define SIZEOF_DOUBLE 8
#define SIZEOF_FLOAT 4
#define SIZEOF_TIME_T 8
#define SIZEOF_PID_T 4
#define ALIGNOF_LONG 8
#define ALIGNOF_SIZE_T 8

#define HAVE_STDDEF_H 1
#define HAVE_STDINT_H 1
#define HAVE_INTTYPES_H 1
#define HAVE_SYS_TYPES_H 1
#define HAVE_SYS_TIME_H 1
#define HAVE_UNISTD_H 1
#define HAVE_WCHAR_H 1
#define HAVE_LONG_DOUBLE 1
#define HAVE_DYNAMIC_LOADING 1
#define WITH_DOC_STRINGS 1

_Static_assert(sizeof(long) == SIZEOF_LONG && sizeof(void *) == SIZEOF_VOID_P, "64-bit");
_Static_assert(sizeof(int) == SIZEOF_INT && sizeof(short) == SIZEOF_SHORT, "integers");
_Static_assert(sizeof(__WCHAR_TYPE__) == SIZEOF_WCHAR_T, "wide characters");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "little-endian");
#ifndef __linux__
#error "Linux"
#endif

#endif
