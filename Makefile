# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# The entry points; what they do is in lab/. Each does all of its own set-up.

LAB = lab/start

.PHONY: ablation demo demo-qemu demo-x86 bench test test-long test-instrumented bench-paths way figures packages release lab-shell lab-setup book \
	fuzz sanitize

demo: ## the whole loop on an emulated Arm host, as a table
	@$(LAB) demo

demo-qemu: ## the same with a stock guest of Debian's own QEMU: Linux' own driver, registers in its RAM
	@$(LAB) demo --vmm qemu

demo-x86: ## the same on an emulated x86-64 host, with guests of Debian's own QEMU
	@$(LAB) demo --arch x86-64

bench: ## ramps, work and energy of host, guest and guest with the bridge; SCENARIO=big-ramp for one, TOPOLOGY=4+3+1
	@$(LAB) bench $(if $(TOPOLOGY),--topology $(TOPOLOGY)) $(SCENARIO)

ablation: ## workloads on guests of which each has one ingredient of the bridge more, in hours; SCENARIO=demand.d90, TOPOLOGY=4+3+1
	@$(LAB) ablation $(if $(TOPOLOGY),--topology $(TOPOLOGY)) $(SCENARIO)

test: ## checks on the sources, the crates' tests, and the scenarios that find most soonest
	@$(LAB) test

test-long: ## the other scenarios: floods, kills, what judges samples, the bench's bounds, other kernels and topologies; lints and dependencies
	@$(LAB) test --long

test-instrumented: ## scenarios on kernels with KASAN, lockdep, kmemleak, UBSAN, and KCSAN, which are built first
	@$(LAB) test --instrumented

bench-paths: ## what an access costs by each path: out/paths.json, and its table in docs/
	@$(LAB) bench-paths
	@cargo run --quiet --locked -p vcpufreq-figures -- paths

way: ## the functions that a request passes, and how big the sources are
	@cargo test --quiet --locked -p vcpufreq-tests --test way --test shape -- --nocapture

figures: ## the tables of README.md and docs/ from what bench, bench-paths, demo and test-long left in out/
	@cargo run --quiet --locked -p vcpufreq-figures

fuzz: ## each fuzz target with libFuzzer; TIME=600 seconds of each, TARGET=registers alone
	@fuzz/run $(or $(TIME),60) $(TARGET)

sanitize: ## the libraries' tests with AddressSanitizer, then under valgrind
	@fuzz/sanitize

packages: ## Debian's packages of program and kernel modules, and archives, in out/packages, tried on Debian 12 and 13
	@$(LAB) packages

release: ## packages, built twice, if no crate has a known vulnerability and a registry would take the crates
	@$(LAB) packages --release

lab-shell: ## a console on the emulated host
	@$(LAB) shell

lab-setup: ## fetch and build everything, and stop
	@$(LAB) setup

book: ## all pages as a book in out/book, and each dead link
	@docs/build
