// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The order of a domain's words in the BPF program and the module's function, in each execution that
//! arm64 allows. Two vCPUs request for one domain at once: what is wanted in the end is the last
//! request. A request finds earlier work queued: what is in force in the end is what is wanted.
//!
//! arm64 is multi-copy atomic: all other CPUs see a store at once. Here a CPU lets each store wait
//! for as long as it likes, those of one word in order, and goes on; an operation with a full
//! barrier waits for all of them. A load takes the CPU's own waiting store, else the memory. These
//! programs have no other freedom: stores depend on the loads before them, and loads of one word are
//! in order.
//!
//! The barriers are those of the sources. `module/tests/*.litmus` has the same for herd7.

use std::collections::{BTreeSet, HashSet};

const KFUNC: &str = include_str!("../module/kfunc.c");
const PROGRAM: &str = include_str!("../bpf/vcpufreq.bpf.c");

/// Words of the memory: what is requested of the domain, what is wanted, what the file has, and
/// whether the vCPU's work is queued.
const CLAMP: usize = 0;
const WANTED: usize = 1;
const FORCE: usize = 2;
const QUEUED: usize = 3;

type Memory = [u8; 4];

#[derive(Clone, Copy)]
enum Op {
    /// Stores a value.
    Store(usize, u8, Barrier),
    /// Stores what the register has.
    Move(usize, usize, Barrier),
    /// Loads into the register.
    Load(usize, usize),
    /// Stores a value at once, and loads what was there into the register: an acquire.
    Exchange(usize, u8, usize),
    /// `vcpufreq_clamp()`, with its lock.
    Clamp,
    /// Ends the program if the registers are equal.
    EndIfSame(usize, usize),
    /// Ends the program if the register has this value.
    EndIfHas(usize, u8),
}

#[derive(Clone, Copy, PartialEq)]
enum Barrier {
    Full,
    None,
}

use Barrier::Full;
use Op::{Clamp, EndIfHas, EndIfSame, Exchange, Load, Move, Store};

#[derive(Clone, Default, PartialEq, Eq, Hash)]
struct Cpu {
    at: usize,
    registers: [u8; 2],
    /// Stores that wait, the oldest first.
    waiting: Vec<(usize, u8)>,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct State {
    memory: Memory,
    cpus: Vec<Cpu>,
}

/// The memories in which all executions end.
fn ends(programs: &[Vec<Op>], memory: Memory) -> BTreeSet<Memory> {
    let first = State {
        memory,
        cpus: vec![Cpu::default(); programs.len()],
    };
    let (mut seen, mut left) = (HashSet::from([first.clone()]), vec![first]);
    let mut ends = BTreeSet::new();
    while let Some(state) = left.pop() {
        let next = state.next(programs);
        if next.is_empty() {
            ends.insert(state.memory);
        }
        left.extend(next.into_iter().filter(|next| seen.insert(next.clone())));
    }
    ends
}

impl State {
    fn next(&self, programs: &[Vec<Op>]) -> Vec<Self> {
        let mut next = Vec::new();
        for (cpu, program) in programs.iter().enumerate() {
            let waiting = &self.cpus[cpu].waiting;
            for (index, (word, value)) in waiting.iter().enumerate() {
                if waiting[..index].iter().all(|(older, _)| older != word) {
                    let mut state = self.clone();
                    state.cpus[cpu].waiting.remove(index);
                    state.memory[*word] = *value;
                    next.push(state);
                }
            }
            if let Some(op) = program.get(self.cpus[cpu].at) {
                next.extend(self.step(cpu, *op));
            }
        }
        next
    }

    /// The state after an operation, unless that has to wait.
    fn step(&self, cpu: usize, op: Op) -> Option<Self> {
        let mut state = self.clone();
        let Self { memory, cpus } = &mut state;
        let own = &mut cpus[cpu];
        own.at += 1;
        let loaded = |own: &Cpu, memory: &Memory, word| {
            let waiting = own.waiting.iter().rfind(|(waits, _)| *waits == word);
            waiting.map_or(memory[word], |(_, value)| *value)
        };
        let (word, value, barrier) = match op {
            Store(word, value, barrier) => (word, value, barrier),
            Move(word, register, barrier) => (word, own.registers[register], barrier),
            Clamp => {
                memory[FORCE] = loaded(own, memory, WANTED);
                return Some(state);
            }
            Load(word, register) => {
                own.registers[register] = loaded(own, memory, word);
                return Some(state);
            }
            Exchange(word, value, register) => {
                own.waiting
                    .iter()
                    .all(|(waits, _)| *waits != word)
                    .then_some(())?;
                own.registers[register] = std::mem::replace(&mut memory[word], value);
                return Some(state);
            }
            EndIfSame(one, other) => {
                if own.registers[one] == own.registers[other] {
                    own.at = usize::MAX;
                }
                return Some(state);
            }
            EndIfHas(register, value) => {
                if own.registers[register] == value {
                    own.at = usize::MAX;
                }
                return Some(state);
            }
        };
        if barrier == Full {
            own.waiting.is_empty().then_some(())?;
            memory[word] = value;
        } else {
            own.waiting.push((word, value));
        }
        Some(state)
    }
}

/// What orders the stores of a source.
#[derive(Clone, Copy)]
struct Barriers {
    clamp: Barrier,
    wanted: Barrier,
    queued: Barrier,
}

impl Barriers {
    /// A store that the sources write in another way has no barrier.
    fn of_sources() -> Self {
        let barrier = |source: &str, store| match source.matches(store).count() {
            1 => Full,
            _ => Barrier::None,
        };
        let exchange = "(__sync_lock_test_and_set(&domain->clamp, event->clamp)";
        Self {
            clamp: barrier(PROGRAM, exchange),
            wanted: barrier(KFUNC, "(xchg(&bound->wanted, clamp)"),
            queued: barrier(KFUNC, "\tatomic_xchg(&work->queued, 0);"),
        }
    }
}

/// `answer()` and `actuate()` of the program for a request, with the store of the module's function.
fn request(value: u8, barriers: Barriers) -> Vec<Op> {
    let turn = [
        Load(CLAMP, 0),
        Move(WANTED, 0, barriers.wanted),
        Load(CLAMP, 1),
        EndIfSame(0, 1),
    ];
    // The other vCPU requests once, so that a third turn isn't needed.
    let mut program = vec![Store(CLAMP, value, barriers.clamp)];
    program.extend([turn; 3].concat());
    program
}

/// Whether it is, whichever vCPU is the last.
fn the_last_request_is_wanted(barriers: Barriers) -> bool {
    let programs = [request(1, barriers), request(2, barriers)];
    let ends = ends(&programs, [0; 4]);
    let last: BTreeSet<u8> = ends.iter().map(|memory| memory[CLAMP]).collect();
    assert_eq!(last, BTreeSet::from([1, 2]));
    ends.iter().all(|memory| memory[CLAMP] == memory[WANTED])
}

/// Whether it is, for a request that finds the work of an earlier one queued, or about to run.
fn what_is_wanted_is_in_force(barriers: Barriers) -> bool {
    let queue = vec![
        Store(WANTED, 1, barriers.wanted),
        // atomic_xchg_acquire()
        Exchange(QUEUED, 1, 0),
        EndIfHas(0, 1),
        // vcpufreq_run() for this request
        Store(QUEUED, 0, barriers.queued),
        Clamp,
    ];
    let run = vec![Store(QUEUED, 0, barriers.queued), Clamp];
    let ends = ends(&[queue, run], [0, 0, 0, 1]);
    ends.iter().all(|memory| memory[FORCE] == 1)
}

#[test]
fn the_barriers_of_the_sources_are_enough() {
    let barriers = Barriers::of_sources();
    assert!(the_last_request_is_wanted(barriers));
    assert!(what_is_wanted_is_in_force(barriers));
}

/// Else these executions would show nothing.
#[test]
fn each_barrier_is_needed() {
    let all = Barriers::of_sources();
    let wanted = Barrier::None;
    let without = Barriers { wanted, ..all };
    assert!(!the_last_request_is_wanted(without));
    assert!(!what_is_wanted_is_in_force(without));
    let queued = Barrier::None;
    assert!(!what_is_wanted_is_in_force(Barriers { queued, ..all }));
}
