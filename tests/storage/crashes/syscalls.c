/* Preloaded library that kills the process inside a chosen system call, makes it fail, or logs calls.
 *
 * Only calls that change files below a root folder count. `syscalls_start` activates it; until
 * then, and in a process that never calls it, everything passes through.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { BEFORE, HALFWAY, AFTER, FAIL }; /* FAIL + errno */

static char root[PATH_MAX];
static size_t root_length;
static long count, kill_at;
static int kill_how, log_file = -1;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

void syscalls_start(const char *folder, long at, int how, int file) {
    count = 0;
    kill_at = at;
    kill_how = how;
    log_file = file;
    snprintf(root, sizeof root, "%s/", folder);
    root_length = strlen(root);
}

long syscalls_count(void) { return count; }

static void put(const void *data, size_t size) {
    const char *bytes = data;
    while (size > 0) {
        long done = syscall(SYS_write, log_file, bytes, size);
        if (done <= 0) abort();
        bytes += done;
        size -= done;
    }
}

static void record(const char *format, ...) {
    if (log_file < 0) return;
    char line[3 * PATH_MAX];
    va_list arguments;
    va_start(arguments, format);
    int size = vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    put(line, size);
}

static int is_inside(const char *path) {
    return root_length && strncmp(path, root, root_length) == 0;
}

static int path_of(int file, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t size = readlink(link, path, PATH_MAX - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return 1;
}

static int watch_path(int folder, const char *name, char *path) {
    if (!root_length) return 0;
    char base[PATH_MAX];
    if (name[0] == '/') {
        snprintf(path, PATH_MAX, "%s", name);
    } else {
        if (folder == AT_FDCWD ? !getcwd(base, sizeof base) : !path_of(folder, base)) return 0;
        if (snprintf(path, PATH_MAX, "%s/%s", base, name) >= PATH_MAX) return 0;
    }
    return is_inside(path);
}

static int watch_file(int file) {
    char path[PATH_MAX];
    if (!root_length || file == log_file || !path_of(file, path)) return 0;
    strncat(path, "/", sizeof path - strlen(path) - 1); /* the root itself counts */
    return is_inside(path);
}

static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

/* Count a call; return 1 if the process is to be killed in its middle or at its end. */
static int begin(void) {
    int hit = __sync_add_and_fetch(&count, 1) == kill_at;
    if (hit && kill_how == BEFORE) die();
    return hit;
}

static int fails(int hit) {
    if (!hit || kill_how <= FAIL) return 0;
    errno = kill_how - FAIL;
    return 1;
}

static unsigned long inode(int file) {
    struct stat status;
    return fstat(file, &status) == 0 ? status.st_ino : 0;
}

static ssize_t write_at(int file, const void *data, size_t size, off_t offset, int positioned) {
    ssize_t (*write_here)(int, const void *, size_t) = REAL(write);
    ssize_t (*write_there)(int, const void *, size_t, off_t) = REAL(pwrite);
    if (!watch_file(file))
        return positioned ? write_there(file, data, size, offset) : write_here(file, data, size);
    int hit = begin();
    if (fails(hit)) return -1;
    if (!positioned) offset = lseek(file, 0, SEEK_CUR);
    if (hit && kill_how == HALFWAY) size /= 2;
    ssize_t done = positioned ? write_there(file, data, size, offset) : write_here(file, data, size);
    if (hit) die();
    if (done > 0 && log_file >= 0) {
        record("write\t%lu\t%ld\t%zd\n", inode(file), (long)offset, done);
        put(data, done);
    }
    return done;
}

ssize_t write(int file, const void *data, size_t size) { return write_at(file, data, size, 0, 0); }
ssize_t pwrite(int file, const void *data, size_t size, off_t offset) {
    return write_at(file, data, size, offset, 1);
}
ssize_t pwrite64(int file, const void *data, size_t size, off64_t offset) {
    return write_at(file, data, size, offset, 1);
}

#define ON_FILE(call, line, ...)            \
    if (!watch_file(file)) return call;     \
    int hit = begin();                      \
    if (fails(hit)) return -1;              \
    int result = call;                      \
    if (hit) die();                         \
    if (result == 0) record(line, inode(file), ##__VA_ARGS__); \
    return result;

int fsync(int file) { ON_FILE(REAL(fsync)(file), "fsync\t%lu\n") }
int fdatasync(int file) { ON_FILE(REAL(fdatasync)(file), "fsync\t%lu\n") }
int ftruncate(int file, off_t size) {
    ON_FILE(REAL(ftruncate)(file, size), "truncate\t%lu\t%ld\n", (long)size)
}
int ftruncate64(int file, off64_t size) {
    ON_FILE(REAL(ftruncate)(file, size), "truncate\t%lu\t%ld\n", (long)size)
}

#define ON_PATH(call, kind)                      \
    char path[PATH_MAX];                         \
    if (!watch_path(folder, name, path)) return call; \
    int hit = begin();                           \
    if (fails(hit)) return -1;                   \
    int result = call;                           \
    if (hit) die();                              \
    if (result == 0) record(kind "\t%s\n", path); \
    return result;

int unlinkat(int folder, const char *name, int flags) {
    ON_PATH(REAL(unlinkat)(folder, name, flags), "remove")
}
int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }

int mkdirat(int folder, const char *name, mode_t mode) {
    char path[PATH_MAX];
    struct stat status;
    if (!watch_path(folder, name, path)) return REAL(mkdirat)(folder, name, mode);
    int hit = begin();
    if (fails(hit)) return -1;
    int result = REAL(mkdirat)(folder, name, mode);
    if (hit) die();
    if (result == 0 && stat(path, &status) == 0)
        record("mkdir\t%s\t%lu\n", path, (unsigned long)status.st_ino);
    return result;
}
int mkdir(const char *name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }

static int move(int from, const char *old, int to, const char *name, unsigned flags) {
    char source[PATH_MAX], target[PATH_MAX];
    int watched = watch_path(from, old, source);
    if (!(watch_path(to, name, target) && watched))
        return syscall(SYS_renameat2, from, old, to, name, flags);
    int hit = begin();
    if (fails(hit)) return -1;
    int result = syscall(SYS_renameat2, from, old, to, name, flags);
    if (hit) die();
    if (result == 0) record("%s\t%s\t%s\n", flags & 2 ? "exchange" : "rename", source, target);
    return result;
}

int renameat2(int from, const char *old, int to, const char *name, unsigned flags) {
    return move(from, old, to, name, flags);
}
int renameat(int from, const char *old, int to, const char *name) {
    return move(from, old, to, name, 0);
}
int rename(const char *old, const char *name) { return move(AT_FDCWD, old, AT_FDCWD, name, 0); }

static int open_at(int folder, const char *name, int flags, mode_t mode) {
    char path[PATH_MAX];
    struct stat status;
    int is_new = (flags & O_CREAT) && watch_path(folder, name, path) && lstat(path, &status) != 0;
    int hit = is_new && begin();
    if (fails(hit)) return -1;
    int file = syscall(SYS_openat, folder, name, flags, mode);
    if (hit) die();
    if (file >= 0 && is_new) {
        record("create\t%s\t%lu\n", path, inode(file));
    } else if (file >= 0 && (flags & O_TRUNC) && watch_file(file)) {
        record("truncate\t%lu\t0\n", inode(file));
    }
    return file;
}

#define OPEN(folder)                            \
    va_list arguments;                          \
    va_start(arguments, flags);                 \
    mode_t mode = va_arg(arguments, mode_t);    \
    va_end(arguments);                          \
    return open_at(folder, name, flags, mode);

int open(const char *name, int flags, ...) { OPEN(AT_FDCWD) }
int open64(const char *name, int flags, ...) { OPEN(AT_FDCWD) }
int openat(int folder, const char *name, int flags, ...) { OPEN(folder) }
int openat64(int folder, const char *name, int flags, ...) { OPEN(folder) }
