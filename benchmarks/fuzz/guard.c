/* Allocator for the probe of operators: every block that torch allocates stands between two unmapped regions.

   cc -O1 -shared -fPIC -o guard.so guard.c, and LD_PRELOAD=guard.so. torch allocates tensors by posix_memalign, which is
   replaced here; a byte read or written beyond the block's pages ends the process by SIGSEGV. The rest of the pages is
   filled with GUARD_FILL, and a changed byte there ends the process by SIGABRT when the block is freed. New blocks are
   filled too, so that a result that depends on foreign memory differs between two fillings. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define GUARD ((size_t)1 << 20) /* unmapped bytes on each side */
#define MOST ((size_t)1 << 28)  /* larger blocks are refused */
#define PAGE ((size_t)4096)
#define SLOTS (1 << 16)

struct block {
    char *at, *pages;
    size_t size, length;
};

int guard_low; /* 1: blocks begin on a page, and reads before them end the process; 0: they end with one */
static struct block blocks[SLOTS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void (*next_free)(void *);
static unsigned char fill;

__attribute__((constructor)) static void start(void) {
    const char *given = getenv("GUARD_FILL");
    fill = given ? (unsigned char)atoi(given) : 0;
    next_free = (void (*)(void *))dlsym(RTLD_NEXT, "free");
}

static struct block *find(const char *at) {
    size_t first = ((uintptr_t)at >> 4) * 2654435761u % SLOTS;
    for (size_t k = 0; k < 64; k++) {
        struct block *b = &blocks[(first + k) % SLOTS];
        if (b->at == at) return b;
    }
    return NULL;
}

static struct block *vacant(const char *at) {
    size_t first = ((uintptr_t)at >> 4) * 2654435761u % SLOTS;
    for (size_t k = 0; k < 64; k++) {
        struct block *b = &blocks[(first + k) % SLOTS];
        if (!b->at) return b;
    }
    return NULL;
}

int posix_memalign(void **out, size_t alignment, size_t size) {
    if (size > MOST) return ENOMEM;
    size_t length = (size + PAGE - 1) / PAGE * PAGE;
    if (!length) length = PAGE;
    char *base = mmap(NULL, length + 2 * GUARD, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) return ENOMEM;
    char *pages = base + GUARD;
    if (mprotect(pages, length, PROT_READ | PROT_WRITE)) return ENOMEM;
    memset(pages, fill, length);
    size_t step = alignment > 16 ? 16 : alignment; /* no kernel needs more, and the end is nearer */
    char *at = guard_low ? pages : pages + (length - size) / step * step;
    pthread_mutex_lock(&lock);
    struct block *b = vacant(at);
    if (b) *b = (struct block){at, pages, size, length};
    pthread_mutex_unlock(&lock);
    if (!b) {
        munmap(base, length + 2 * GUARD);
        return ENOMEM;
    }
    *out = at;
    return 0;
}

static void broken(void) {
    static const char text[] = "guard: bytes beside a block were overwritten\n";
    if (write(2, text, sizeof text - 1)) {}
    abort();
}

void free(void *p) {
    if (!p) return;
    pthread_mutex_lock(&lock);
    struct block *b = find(p);
    struct block found = b ? *b : (struct block){0};
    if (b) b->at = NULL;
    pthread_mutex_unlock(&lock);
    if (!b) {
        if (next_free) next_free(p);
        return;
    }
    for (char *c = found.pages; c < found.pages + found.length; c++) {
        if (c == found.at) c += found.size;
        if (c < found.pages + found.length && (unsigned char)*c != fill) broken();
    }
    munmap(found.pages - GUARD, found.length + 2 * GUARD);
}
