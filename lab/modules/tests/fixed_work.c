// SPDX-License-Identifier: GPL-2.0-only
/*
 * fixed_work CPU ROUNDS [REPEAT [PAUSE_US]]
 *
 * Pins itself to a CPU and prints how long ROUNDS turns of an empty loop take,
 * in ns of elapsed and of the thread's own time, a line each for REPEAT times,
 * after a pause of PAUSE_US each. It runs as SCHED_FIFO, so few other tasks'
 * time is in the first and none's is in the second; interrupts' is in both.
 * Exit: 0 done, 2 bad arguments, no such CPU or no right to.
 */
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static unsigned long long now_ns(clockid_t clock)
{
	struct timespec now;

	clock_gettime(clock, &now);
	return now.tv_sec * 1000000000ULL + now.tv_nsec;
}

int main(int argc, char **argv)
{
	unsigned long long rounds, i, start, ran;
	const struct sched_param priority = { .sched_priority = 50 };
	unsigned long repeat, pause_us;
	cpu_set_t cpus;

	if (argc < 3) {
		fprintf(stderr, "usage: fixed_work CPU ROUNDS [REPEAT [PAUSE_US]]\n");
		return 2;
	}
	rounds = strtoull(argv[2], NULL, 0);
	repeat = argc > 3 ? strtoul(argv[3], NULL, 0) : 1;
	pause_us = argc > 4 ? strtoul(argv[4], NULL, 0) : 0;

	CPU_ZERO(&cpus);
	CPU_SET(strtoul(argv[1], NULL, 0), &cpus);
	if (sched_setaffinity(0, sizeof(cpus), &cpus)) {
		perror("fixed_work: cannot run on this CPU");
		return 2;
	}
	if (sched_setscheduler(0, SCHED_FIFO, &priority)) {
		perror("fixed_work: cannot become SCHED_FIFO");
		return 2;
	}
	while (repeat--) {
		usleep(pause_us);
		start = now_ns(CLOCK_MONOTONIC);
		ran = now_ns(CLOCK_THREAD_CPUTIME_ID);
		for (i = rounds; i; i--)
			__asm__ volatile("");
		ran = now_ns(CLOCK_THREAD_CPUTIME_ID) - ran;
		printf("%llu %llu\n", now_ns(CLOCK_MONOTONIC) - start, ran);
	}
	return 0;
}
