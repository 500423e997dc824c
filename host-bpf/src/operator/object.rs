// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A policy's object, from its bytes to a program on a function's entry.

#![forbid(unsafe_code)]

use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};

use libbpf_rs::{Link, MapCore as _, Object, ObjectBuilder, OpenObject};

use super::instructions::refusal;
use crate::error::BpfError;
use crate::layout::{POLICY_CALL_SIZE, POLICY_LAYOUT};
use crate::libbpf_log::{explained, refused};

/// What it is attached to, as its section names it.
const FUNCTION: &str = "vcpufreq_policy";
const SECTION: &str = "fentry/vcpufreq_policy";
/// The map of calls, which is the VM's.
const CALLS: &str = "policy_calls";
/// `struct vcpufreq_policy_setup`.
const SETUP: &str = ".rodata.policy";

/// Where a policy goes.
#[derive(Clone, Copy)]
pub(super) struct PolicyPlace<'a> {
    /// The program that has the function.
    pub program: BorrowedFd<'a>,
    /// The calls that it writes.
    pub calls: BorrowedFd<'a>,
    /// The number of the policy there.
    pub number: u32,
}

/// A policy on one program. Dropping it detaches it.
#[derive(Debug)]
pub(super) struct AttachedPolicy {
    _link: Link,
    object: Object,
}

impl AttachedPolicy {
    /// Loads and attaches it; with `other`, whose maps it shares.
    pub(super) fn new(
        bytes: &[u8],
        place: PolicyPlace<'_>,
        other: Option<&Self>,
    ) -> Result<Self, BpfError> {
        let mut open = explained("opening the policy", || {
            ObjectBuilder::default().open_memory(bytes)
        })?;
        set_up(&mut open, place, other)?;
        let object = explained("the policy is refused", || open.load())?;
        Ok(Self {
            _link: attach(&object)?,
            object,
        })
    }
}

/// Attaches the only program of a loaded object, if it is a policy.
fn attach(object: &Object) -> Result<Link, BpfError> {
    let mut programs = object.progs_mut();
    let (Some(program), None) = (programs.next(), programs.next()) else {
        return Err(no_policy());
    };
    let instructions = program.insns().iter();
    let mut refusals = instructions.filter_map(|one| refusal((one.code, one.src_reg(), one.imm)));
    if let Some(why) = refusals.next() {
        return Err(BpfError::Policy(why));
    }
    explained("attaching the policy", || program.attach())
}

fn no_policy() -> BpfError {
    BpfError::Policy("it is none; make one with VCPUFREQ_POLICY of vcpufreq_policy.h".to_owned())
}

fn set_up(
    open: &mut OpenObject,
    place: PolicyPlace<'_>,
    other: Option<&AttachedPolicy>,
) -> Result<(), BpfError> {
    let mut layout = None;
    for mut map in open.maps_mut() {
        let name = map.name().to_owned();
        if name == CALLS {
            if usize::try_from(map.value_size()).ok() != Some(POLICY_CALL_SIZE) {
                return Err(no_policy());
            }
            map.reuse_fd(place.calls)
                .map_err(refused("using the VM's map of calls"))?;
            continue;
        }
        if name == SETUP {
            let setup = map.initial_value_mut();
            let setup = setup.and_then(|bytes| bytes.first_chunk_mut::<8>());
            let Some([a, b, c, d, number @ ..]) = setup else {
                return Err(no_policy());
            };
            layout = Some(u32::from_ne_bytes([*a, *b, *c, *d]));
            *number = place.number.to_ne_bytes();
        }
        // Else the copies of a policy would remember different things.
        let mut others = other.iter().flat_map(|other| other.object.maps());
        if let Some(shared) = others.find(|one| one.name() == name) {
            map.reuse_fd(shared.as_fd())
                .map_err(refused("sharing the policy's maps"))?;
        }
    }
    match layout {
        Some(POLICY_LAYOUT) => {}
        Some(found) => {
            return Err(BpfError::Policy(format!(
                "it is of layout {found} of vcpufreq_policy.h, this program of {POLICY_LAYOUT}; \
                 build it anew"
            )));
        }
        None => return Err(no_policy()),
    }
    for mut program in open.progs_mut() {
        if program.section() != SECTION {
            return Err(no_policy());
        }
        program
            .set_attach_target(place.program.as_raw_fd(), Some(FUNCTION.to_owned()))
            .map_err(refused("finding where the policy goes"))?;
    }
    Ok(())
}
