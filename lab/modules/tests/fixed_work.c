// SPDX-License-Identifier: GPL-2.0-only
/*
 * fixed_work CPU ROUNDS [REPEAT [PAUSE_US]]
 *
 * Pins itself to a CPU and prints how long ROUNDS turns of an empty loop take,
 * in ns, a line each for REPEAT times, after a pause of PAUSE_US each. The time
 * is what the clock says, so it has everything in it that slows the CPU down.
 * Exit: 0 done, 2 bad arguments or no such CPU.
 */
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static unsigned long long now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000000ULL + now.tv_nsec;
}

int main(int argc, char **argv)
{
	unsigned long long rounds, i, start;
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
	while (repeat--) {
		usleep(pause_us);
		start = now_ns();
		for (i = rounds; i; i--)
			__asm__ volatile("");
		printf("%llu\n", now_ns() - start);
	}
	return 0;
}
