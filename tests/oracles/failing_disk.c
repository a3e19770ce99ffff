// A disk that fails. Loaded before libc (LD_PRELOAD), it makes the N-th call that changes files
// below a folder return an error.
//
// FAULT_FOLDER   the folder; nothing else is touched
// FAULT_AT       N, from 1; 0 to fail none and only count
// FAULT_ERRNO    number of the error
// FAULT_ON       1: every such call from the N-th on fails; 0: that one only
// FAULT_NAME     count only calls whose text "call path" has this; a path begins after the folder
// FAULT_LOG      a file outside of the folder for "call path" of each; "FAILED" before failures
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static atomic_long calls;

static const char *setting(const char *name) {
  const char *value = getenv(name);
  return value ? value : "";
}

static int fails(const char *call, const char *path) {
  const char *folder = setting("FAULT_FOLDER");
  char text[PATH_MAX + 32];
  size_t length = strlen(folder);
  if (!length || strncmp(path, folder, length) != 0 || (path[length] && path[length] != '/'))
    return 0;
  snprintf(text, sizeof text, "%s %s", call, path + length);
  if (!strstr(text, setting("FAULT_NAME"))) return 0;
  long number = atomic_fetch_add(&calls, 1) + 1, at = atol(setting("FAULT_AT"));
  int failing = at && (atoi(setting("FAULT_ON")) ? number >= at : number == at);
  if (*setting("FAULT_LOG")) {
    static int (*really_open)(const char *, int, ...);
    static ssize_t (*really_write)(int, const void *, size_t);
    if (!really_open) really_open = dlsym(RTLD_NEXT, "open");
    if (!really_write) really_write = dlsym(RTLD_NEXT, "write");
    char line[PATH_MAX + 64];
    int size = snprintf(line, sizeof line, "%s%s\n", failing ? "FAILED " : "", text);
    int log = really_open(setting("FAULT_LOG"), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (log >= 0 && really_write(log, line, size) < 0) abort();
    if (log >= 0) close(log);
  }
  if (failing) errno = atoi(setting("FAULT_ERRNO"));
  return failing;
}

static const char *of_descriptor(int descriptor, char *buffer) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  ssize_t length = readlink(link, buffer, PATH_MAX - 1);
  buffer[length < 0 ? 0 : length] = 0;
  return buffer;
}

static const char *at_folder(int folder, const char *path, char *buffer) {
  char base[PATH_MAX];
  if (*path == '/') return path;
  if (folder == AT_FDCWD) {
    if (!getcwd(base, sizeof base)) *base = 0;
  } else {
    of_descriptor(folder, base);
  }
  snprintf(buffer, PATH_MAX, "%.2000s/%.2000s", base, path);
  return buffer;
}

#define REAL(name) \
  static __typeof__(name) *real; \
  if (!real) real = dlsym(RTLD_NEXT, #name)
#define ON_PATH(type, name, parameters, arguments, folder, path) \
  type name parameters { \
    REAL(name); \
    char buffer[PATH_MAX]; \
    return fails(#name, at_folder(folder, path, buffer)) ? -1 : real arguments; \
  }
#define ON_DESCRIPTOR(type, name, parameters, arguments) \
  type name parameters { \
    REAL(name); \
    char buffer[PATH_MAX]; \
    int before = errno; \
    const char *path = of_descriptor(descriptor, buffer); \
    errno = before; \
    return fails(#name, path) ? -1 : real arguments; \
  }
#define OPEN(name, first, folder, ...) \
  int name(first const char *path, int flags, ...) { \
    REAL(name); \
    char buffer[PATH_MAX]; \
    mode_t mode = 0; \
    if (flags & (O_CREAT | __O_TMPFILE)) { \
      va_list list; \
      va_start(list, flags); \
      mode = va_arg(list, mode_t); \
      va_end(list); \
    } \
    if ((flags & O_ACCMODE) != O_RDONLY && fails("open", at_folder(folder, path, buffer))) \
      return -1; \
    return real(__VA_ARGS__ path, flags, mode); \
  }
#define COMMA ,

OPEN(open, , AT_FDCWD, )
OPEN(open64, , AT_FDCWD, )
OPEN(openat, int folder COMMA, folder, folder COMMA)
OPEN(openat64, int folder COMMA, folder, folder COMMA)
ON_PATH(int, mkdir, (const char *path, mode_t mode), (path, mode), AT_FDCWD, path)
ON_PATH(int, mkdirat, (int folder, const char *path, mode_t mode),
        (folder, path, mode), folder, path)
ON_PATH(int, rename, (const char *path, const char *to), (path, to), AT_FDCWD, path)
ON_PATH(int, renameat, (int folder, const char *path, int other, const char *to),
        (folder, path, other, to), folder, path)
ON_PATH(int, link, (const char *path, const char *to), (path, to), AT_FDCWD, to)
ON_PATH(int, symlink, (const char *path, const char *to), (path, to), AT_FDCWD, to)
ON_PATH(int, unlink, (const char *path), (path), AT_FDCWD, path)
ON_PATH(int, unlinkat, (int folder, const char *path, int flags),
        (folder, path, flags), folder, path)
ON_PATH(int, rmdir, (const char *path), (path), AT_FDCWD, path)
ON_DESCRIPTOR(ssize_t, write, (int descriptor, const void *data, size_t size),
        (descriptor, data, size))
ON_DESCRIPTOR(ssize_t, pwrite, (int descriptor, const void *data, size_t size, off_t at),
        (descriptor, data, size, at))
ON_DESCRIPTOR(ssize_t, pwrite64, (int descriptor, const void *data, size_t size, off64_t at),
        (descriptor, data, size, at))
ON_DESCRIPTOR(ssize_t, writev, (int descriptor, const struct iovec *data, int count),
        (descriptor, data, count))
ON_DESCRIPTOR(int, fsync, (int descriptor), (descriptor))
ON_DESCRIPTOR(int, fdatasync, (int descriptor), (descriptor))
ON_DESCRIPTOR(int, ftruncate, (int descriptor, off_t size), (descriptor, size))
ON_DESCRIPTOR(int, ftruncate64, (int descriptor, off64_t size), (descriptor, size))
