// A disk that is unwell: loaded by LD_PRELOAD, it fails chosen file operations below one folder.
//
// FAULTS names a file of `struct control` that the process which injects shares with those that suffer: it arms a fault,
// reads how many operations of each kind there were, and how many of them failed. `shim.py` beside it writes it.
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { OPEN, READ, PREAD, WRITE, PWRITE, FSYNC, RENAME, UNLINK, STAT, LIST, MKDIR, KINDS };
enum effect { ERROR, SHORT, TORN, SLOW, KILL, KILL_AFTER };

struct control {
  uint64_t calls[KINDS], fired;            // so far
  uint64_t kind, effect, error, first, times;  // from the call number `first` (from 0) on, so many times; none where 0
  uint64_t milliseconds;                   // of SLOW
  char folder[PATH_MAX];
};

static struct control *control;

__attribute__((constructor)) static void start(void) {
  const char *name = getenv("FAULTS");
  int fd = name ? open(name, O_RDWR | O_CLOEXEC) : -1;
  void *memory = fd < 0 ? MAP_FAILED : mmap(0, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory != MAP_FAILED) control = memory;
}

#define REAL(name) static __typeof__(name) *real; if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

static int below(const char *path) {
  size_t length = strlen(control->folder);
  return length && !strncmp(path, control->folder, length) && (path[length] == '/' || !path[length]);
}

static int of_fd(int fd, char *path) {
  char link[40];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, PATH_MAX - 1);
  path[length < 0 ? 0 : length] = 0;
  return length >= 0;
}

static ssize_t last(int effect, ssize_t result) {
  if (effect == KILL_AFTER) kill(getpid(), SIGKILL);
  return result;
}

// Whether this operation suffers; -1 where the error is all there is to it (errno is set), otherwise the effect.
static int suffers(enum kind kind, int fd, const char *name) {
  char path[2 * PATH_MAX];
  if (!control || !*control->folder) return ERROR;
  int before = errno;
  if (name && *name == '/') snprintf(path, sizeof path, "%s", name);
  else if (fd == AT_FDCWD ? !getcwd(path, PATH_MAX) : !of_fd(fd, path)) path[0] = 0;
  else if (name) snprintf(path + strlen(path), PATH_MAX, "/%s", name);
  errno = before;
  if (!below(path)) return ERROR;
  uint64_t number = __atomic_fetch_add(&control->calls[kind], 1, __ATOMIC_SEQ_CST);
  if (kind != control->kind || number - control->first >= control->times) return ERROR;
  __atomic_fetch_add(&control->fired, 1, __ATOMIC_SEQ_CST);
  if (control->effect == SLOW) usleep(1000 * control->milliseconds);
  if (control->effect == KILL) kill(getpid(), SIGKILL);
  if (control->effect != ERROR) return control->effect;
  errno = control->error;
  return -1;
}

#define WRAP(kind, fd, path, type, name, parameters, arguments) \
  type name parameters { \
    REAL(name); int effect = suffers(kind, fd, path); \
    return effect < 0 ? (type)-1 : last(effect, real arguments); }

#define OPENS(name) \
  int name(const char *path, int flags, ...) { \
    REAL(name); va_list more; va_start(more, flags); mode_t mode = va_arg(more, mode_t); va_end(more); \
    int effect = suffers(OPEN, AT_FDCWD, path); \
    return effect < 0 ? -1 : last(effect, real(path, flags, mode)); }
OPENS(open) OPENS(open64)

#define OPENSAT(name) \
  int name(int fd, const char *path, int flags, ...) { \
    REAL(name); va_list more; va_start(more, flags); mode_t mode = va_arg(more, mode_t); va_end(more); \
    int effect = suffers(OPEN, fd, path); \
    return effect < 0 ? -1 : last(effect, real(fd, path, flags, mode)); }
OPENSAT(openat) OPENSAT(openat64)

// Half of what is asked for: said (SHORT), or with an error after it (TORN), which for a read is all the same.
#define MOVES(kind, name, tail, parameters, ...) \
  ssize_t name parameters { \
    REAL(name); int effect = suffers(kind, fd, 0); \
    if (effect < 0) return -1; \
    if ((effect != SHORT && effect != TORN && effect != KILL_AFTER) || size < 2) return real(fd, data, size __VA_ARGS__); \
    ssize_t done = last(effect, real(fd, data, size / 2 __VA_ARGS__)); \
    if (effect == TORN && done >= 0) { errno = EIO; return -1; } \
    return done; }
MOVES(READ, read, , (int fd, void *data, size_t size))
MOVES(PREAD, pread, , (int fd, void *data, size_t size, off_t at), , at)
MOVES(PREAD, pread64, , (int fd, void *data, size_t size, off64_t at), , at)
MOVES(WRITE, write, , (int fd, const void *data, size_t size))
MOVES(PWRITE, pwrite, , (int fd, const void *data, size_t size, off_t at), , at)
MOVES(PWRITE, pwrite64, , (int fd, const void *data, size_t size, off64_t at), , at)

ssize_t writev(int fd, const struct iovec *parts, int count) {
  REAL(writev);
  int effect = suffers(WRITE, fd, 0);
  if (effect < 0) return -1;
  if (effect != SHORT && effect != TORN && effect != KILL_AFTER) return real(fd, parts, count);
  struct iovec half = {parts[0].iov_base, (parts[0].iov_len + 1) / 2};
  ssize_t done = last(effect, real(fd, &half, 1));
  if (effect == TORN && done >= 0) { errno = EIO; return -1; }
  return done;
}

WRAP(FSYNC, fd, 0, int, fsync, (int fd), (fd))
WRAP(FSYNC, fd, 0, int, fdatasync, (int fd), (fd))
WRAP(RENAME, AT_FDCWD, from, int, rename, (const char *from, const char *to), (from, to))
WRAP(RENAME, fd, from, int, renameat, (int fd, const char *from, int to_fd, const char *to), (fd, from, to_fd, to))
WRAP(UNLINK, AT_FDCWD, path, int, unlink, (const char *path), (path))
WRAP(UNLINK, fd, path, int, unlinkat, (int fd, const char *path, int flags), (fd, path, flags))
WRAP(UNLINK, AT_FDCWD, path, int, rmdir, (const char *path), (path))
WRAP(MKDIR, AT_FDCWD, path, int, mkdir, (const char *path, mode_t mode), (path, mode))
WRAP(MKDIR, fd, path, int, mkdirat, (int fd, const char *path, mode_t mode), (fd, path, mode))
#define STATS(name, type) WRAP(STAT, AT_FDCWD, path, int, name, (const char *path, struct type *buffer), (path, buffer))
STATS(stat, stat) STATS(stat64, stat64) STATS(lstat, stat) STATS(lstat64, stat64)
WRAP(STAT, fd, path, int, fstatat, (int fd, const char *path, struct stat *b, int flags), (fd, path, b, flags))
WRAP(STAT, fd, path, int, fstatat64, (int fd, const char *path, struct stat64 *b, int flags), (fd, path, b, flags))

DIR *opendir(const char *path) { REAL(opendir); return suffers(LIST, AT_FDCWD, path) < 0 ? 0 : real(path); }
DIR *fdopendir(int fd) { REAL(fdopendir); return suffers(LIST, fd, 0) < 0 ? 0 : real(fd); }
