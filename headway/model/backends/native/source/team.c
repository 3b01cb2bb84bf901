/* A team of threads that runs one function together.

   The work between two meetings is a phase: a number of tasks. Each thread owns a contiguous part of
   the tasks, so that it reads memory in order, and takes tasks of other threads when its own are
   done: a thread that is slow, because another process uses its core, does not delay the others by
   more than one task. Tasks write different outputs, so results do not depend on the order. */

#include <sched.h>
#include <stdint.h>
#if defined(_OPENMP)
#include <omp.h>
#else
#include <pthread.h>
#endif

#define MAX_THREADS 128
#define SPINS 4000 /* about 10 us; then give up the core: the thread that is waited for may need it */
#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() ((void)0)
#endif

typedef struct {
    int64_t taken;
    char unused[56]; /* one cache line for each thread */
} Counter;

typedef struct {
    int32_t threads, arrived, round;
    Counter counters[2][MAX_THREADS]; /* tasks taken of each thread's part; phases alternate */
} Team;

/* One thread of a team. */
typedef struct {
    Team *team;
    int thread, phase;
    int visited; /* threads whose tasks are all taken, in turn from this one */
    int64_t last; /* when the part that is being timed began */
} Member;

typedef void (*Work)(Member *me, const void *call);

/* The next of `count` tasks of this phase for this thread; -1 if all are taken. */
static int64_t next_task(Member *me, int64_t count) {
    const int threads = me->team->threads;
    for (; me->visited < threads; me->visited++) {
        const int owner = (me->thread + me->visited) % threads;
        Counter *counter = &me->team->counters[me->phase][owner];
        const int64_t task = count * owner / threads +
                             __atomic_fetch_add(&counter->taken, 1, __ATOMIC_RELAXED);
        if (task < count * (owner + 1) / threads) return task;
    }
    return -1;
}

/* Wait until all threads have ended this phase. */
static void meet(Member *me) {
    Team *team = me->team;
    const int32_t round = __atomic_load_n(&team->round, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&team->arrived, 1, __ATOMIC_ACQ_REL) == team->threads) {
        for (int t = 0; t < team->threads; t++) team->counters[me->phase][t].taken = 0;
        team->arrived = 0;
        __atomic_store_n(&team->round, round + 1, __ATOMIC_RELEASE);
    } else
        for (int i = 0; __atomic_load_n(&team->round, __ATOMIC_ACQUIRE) == round; i++)
            if (i < SPINS) PAUSE();
            else sched_yield();
    me->phase = !me->phase;
    me->visited = 0;
}

#if defined(_OPENMP)

/* Run `work` with torch's own pool of threads. */
static void run_team(int64_t threads, Work work, const void *call) {
    Team team = {.threads = 1};
#pragma omp parallel num_threads((int)(threads < MAX_THREADS ? threads : MAX_THREADS))
    {
#pragma omp single
        team.threads = omp_get_num_threads();
        Member me = {.team = &team, .thread = omp_get_thread_num()};
        work(&me, call);
    }
}

#else

typedef struct {
    Member member;
    Work work;
    const void *call;
} Start;

/* A new thread waits until the size of the team is known. */
static void *start_member(void *argument) {
    Start *start = argument;
    while (!__atomic_load_n(&start->member.team->threads, __ATOMIC_ACQUIRE)) sched_yield();
    start->work(&start->member, start->call);
    return 0;
}

/* Run `work` with this thread and as many new ones as can be started. */
static void run_team(int64_t threads, Work work, const void *call) {
    Team team = {.threads = 0};
    pthread_t others[MAX_THREADS];
    Start starts[MAX_THREADS];
    int started = 1;
    for (; started < (threads < MAX_THREADS ? threads : MAX_THREADS); started++) {
        starts[started] = (Start){{.team = &team, .thread = started}, work, call};
        if (pthread_create(&others[started], 0, start_member, &starts[started])) break;
    }
    __atomic_store_n(&team.threads, started, __ATOMIC_RELEASE);
    Member me = {.team = &team};
    work(&me, call);
    for (int t = 1; t < started; t++) pthread_join(others[t], 0);
}

#endif
