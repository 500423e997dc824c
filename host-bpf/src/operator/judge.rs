// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A policy is tried before it is in force: on the VM's last requests, each entry of its tables and
//! no request, soon and long after a wake-up, beside no load and full load. It has to answer each
//! with a clamp, in time.

#![forbid(unsafe_code)]

use std::os::fd::AsFd as _;

use libbpf_rs::{Map, MapCore as _, MapFlags, Object, ProgramInput};

use super::object::{AttachedPolicy, PolicyPlace};
use crate::error::BpfError;
use crate::layout::ASK_SIZE;
use crate::libbpf_log::{explained, refused};
use crate::objects::{self, JUDGE};

/// A program asks it while a guest waits. An answer takes less than 1 µs; the lab's hosts are slow.
const MOST_NS: u64 = 100_000;
/// The least of so many counts, of an answer that took longer.
const TRIES: usize = 5;
/// Of the policy that is tried.
const NUMBER: u32 = 1;
/// `POLICY_SILENT` of `bpf/decide.h`.
const SILENT: u32 = 2;

/// What a policy is tried on.
pub(super) struct PolicyTrial {
    /// A `struct vcpufreq_bpf_policy`.
    pub policy: Vec<u8>,
    pub vcpu: u32,
    /// Requests, kHz.
    pub requests: Vec<u32>,
}

/// Tries policies by the rule as a VM's programs have it, without a VM.
#[derive(Debug)]
pub(super) struct PolicyJudge(Object);

impl PolicyJudge {
    pub(super) fn new() -> Result<Self, BpfError> {
        let open = objects::open(JUDGE)?;
        explained("loading the BPF programs", || open.load()).map(Self)
    }

    /// Tries a policy; the first of what is wrong.
    pub(super) fn judge(&self, bytes: &[u8], trials: &[PolicyTrial]) -> Result<(), BpfError> {
        let (calls, policies) = (self.map("policy_calls")?, self.map("policies")?);
        let program = self.0.progs_mut().next();
        let program = program.ok_or(BpfError::Refused {
            what: "vcpufreq_judge",
            why: "the object has no such program".into(),
        })?;
        let place = PolicyPlace {
            program: program.as_fd(),
            calls: calls.as_fd(),
            number: NUMBER,
        };
        let _policy = AttachedPolicy::new(bytes, place, None)?;
        for trial in trials {
            let key = 0_u32.to_ne_bytes();
            policies
                .update(&key, &trial.policy, MapFlags::ANY)
                .map_err(refused("storing a policy"))?;
            for ask in asks(trial) {
                try_on(&self.0, &ask)?;
            }
        }
        Ok(())
    }

    fn map(&self, name: &'static str) -> Result<Map<'_>, BpfError> {
        let found = self.0.maps().find(|map| map.name() == name);
        found.ok_or(BpfError::Refused {
            what: name,
            why: "the object has no such map".into(),
        })
    }
}

/// A `struct vcpufreq_policy_ask`, as far as the program doesn't know it.
struct PolicyAsk {
    woken_ns: u64,
    vcpu: u32,
    khz: u32,
    util: u32,
    number: u32,
}

impl PolicyAsk {
    fn bytes(&self) -> [u8; ASK_SIZE] {
        let mut bytes = [0; ASK_SIZE];
        bytes[8..16].copy_from_slice(&self.woken_ns.to_ne_bytes());
        let (vcpu, khz) = (self.vcpu, self.khz);
        for (at, word) in [
            (20, vcpu),
            (28, khz),
            (48, self.util),
            (52, self.util),
            (56, self.number),
        ] {
            bytes[at..at + 4].copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }
}

fn asks(trial: &PolicyTrial) -> impl Iterator<Item = PolicyAsk> {
    let now = vcpufreq_host::monotonic_ns();
    trial.requests.iter().flat_map(move |khz| {
        [(0, 0), (now, 1024), (now / 2, 512)].map(|(woken_ns, util)| PolicyAsk {
            woken_ns,
            vcpu: trial.vcpu,
            khz: *khz,
            util,
            number: NUMBER,
        })
    })
}

fn try_on(judge: &Object, ask: &PolicyAsk) -> Result<(), BpfError> {
    let mut least = u64::MAX;
    for _ in 0..TRIES {
        least = least.min(run(judge, ask)?);
        if least <= MOST_NS {
            return Ok(());
        }
    }
    Err(BpfError::Policy(format!(
        "it takes {} µs for a request of {} kHz, and may take {}",
        least / 1000,
        ask.khz,
        MOST_NS / 1000
    )))
}

/// How long it takes, in ns.
fn run(judge: &Object, ask: &PolicyAsk) -> Result<u64, BpfError> {
    let mut context = ask.bytes();
    let input = ProgramInput {
        context_in: Some(&mut context),
        ..ProgramInput::default()
    };
    let mut programs = judge.progs_mut();
    let program = programs.next().map(|program| program.test_run(input));
    let output = program.transpose().map_err(refused("trying the policy"))?;
    let outcome = output.map_or(SILENT, |output| output.return_value);
    let calls = judge.maps().find(|map| map.name() == "policy_calls");
    let call = calls.map(|calls| calls.lookup(&0_u32.to_ne_bytes(), MapFlags::ANY));
    let call = call.transpose().map_err(refused("reading the answer"))?;
    let call = call.flatten().unwrap_or_default();
    let word = |at: usize| {
        let bytes = call.get(at..).and_then(|bytes| bytes.first_chunk());
        bytes.map_or(0, |bytes| u32::from_ne_bytes(*bytes))
    };
    let (min, max) = (word(ASK_SIZE), word(ASK_SIZE + 4));
    let of = format!("a request of {} kHz of vCPU {}", ask.khz, ask.vcpu);
    match outcome {
        SILENT => Err(BpfError::Policy(format!("it doesn't answer {of}"))),
        _ if min > max || max > 1024 => Err(BpfError::Policy(format!(
            "its answer to {of} is no clamp: min {min}, max {max}; give min at most max, max at most \
             1024"
        ))),
        _ => Ok(context
            .first_chunk()
            .map_or(0, |bytes| u64::from_ne_bytes(*bytes))),
    }
}

#[cfg(test)]
mod tests {
    //! Promise: a question is as the program reads it.
    use super::*;

    #[test]
    fn words_are_where_the_header_has_them() {
        let ask = PolicyAsk {
            woken_ns: 7,
            vcpu: 1,
            khz: 600_000,
            util: 512,
            number: 3,
        };
        let bytes = ask.bytes();
        let words: Vec<u32> = bytes
            .chunks_exact(4)
            .map(|bytes| u32::from_ne_bytes(bytes.try_into().unwrap()))
            .collect();
        // now_ns, woken_ns, why, vcpu, pcpu, khz, min, max, limit, floor, own, others, number, pad
        let expected = [0, 0, 7, 0, 0, 1, 0, 600_000, 0, 0, 0, 0, 512, 512, 3, 0];
        assert_eq!(words, expected);
    }
}
