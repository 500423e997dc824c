// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The hypercall form of the two accesses that matter: cur_perf and set_perf of
//! the calling vCPU (`docs/registers.md`).
//!
//! Not here: how KVM hands a call over, which is the architecture's. Which
//! device answers is the bus', as for MMIO.

use vcpufreq_device::{
    CALL_CUR_PERF, CALL_SET_PERF, CALL_VERSION, REG_CUR_PERF, REG_SET_PERF, REGION_STRIDE, VcpuId,
};

use super::bus::Bus;
use super::layout::CPUFREQ_BASE;

/// What [`CALL_VERSION`] returns.
const VERSION: i64 = 1;
/// SMCCC (Arm DEN0028), 7.1: results of any call.
const SUCCESS: i64 = 0;
const NOT_SUPPORTED: i64 = -1;

/// Which hypercalls a guest has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Hypercalls {
    /// None: KVM answers that.
    #[default]
    None,
    /// All are forwarded to this program.
    Forwarded,
    /// BPF sees the writes in the kernel, where KVM answers them with
    /// NOT_SUPPORTED; the others are forwarded.
    WritesInKernel,
}

impl Hypercalls {
    /// The function numbers that KVM is to forward.
    pub fn forwarded(self) -> &'static [u32] {
        match self {
            Self::None => &[],
            Self::Forwarded => &[CALL_VERSION, CALL_CUR_PERF, CALL_SET_PERF],
            Self::WritesInKernel => &[CALL_VERSION, CALL_CUR_PERF],
        }
    }
}

/// A call that is one of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    Version,
    CurPerf,
    SetPerf,
}

impl Call {
    fn decode(function: u64) -> Option<Self> {
        match u32::try_from(function).ok()? {
            CALL_VERSION => Some(Self::Version),
            CALL_CUR_PERF => Some(Self::CurPerf),
            CALL_SET_PERF => Some(Self::SetPerf),
            _ => None,
        }
    }
}

/// Carries out a call of vCPU `caller`; what it returns. `argument` is asked
/// for where the call has one; without an answer the call isn't supported.
pub fn carry_out(
    function: u64,
    argument: impl FnOnce() -> Option<u32>,
    bus: &Bus,
    caller: VcpuId,
) -> i64 {
    let page = CPUFREQ_BASE + u64::from(caller.0) * REGION_STRIDE;
    match Call::decode(function) {
        Some(Call::Version) => VERSION,
        Some(Call::CurPerf) => {
            let mut khz = [0; 4];
            bus.read(page + REG_CUR_PERF, &mut khz);
            i64::from(u32::from_le_bytes(khz).min(i32::MAX.cast_unsigned()))
        }
        Some(Call::SetPerf) => match argument() {
            Some(khz) => {
                bus.write(page + REG_SET_PERF, &khz.to_le_bytes());
                SUCCESS
            }
            None => NOT_SUPPORTED,
        },
        None => {
            bus.count_unclaimed();
            NOT_SUPPORTED
        }
    }
}

#[cfg(test)]
mod tests {
    //! A call is an access of the caller's own page; whatever else a guest
    //! calls is answered with NOT_SUPPORTED, and reaches no device.

    use std::sync::{Arc, Mutex};

    use proptest::prelude::*;

    use super::*;
    use crate::vm::bus::MmioDevice;

    #[derive(Default)]
    struct Seen(Mutex<Vec<(u64, Option<u32>)>>);

    impl MmioDevice for Seen {
        fn read(&self, offset: u64, data: &mut [u8]) {
            data.copy_from_slice(&u32::MAX.to_le_bytes());
            self.0.lock().unwrap().push((offset, None));
        }

        fn write(&self, offset: u64, data: &[u8]) {
            let value = u32::from_le_bytes(data.try_into().unwrap());
            self.0.lock().unwrap().push((offset, Some(value)));
        }
    }

    fn bench() -> (Bus, Arc<Seen>) {
        let (mut bus, seen) = (Bus::new(), Arc::new(Seen::default()));
        bus.insert(CPUFREQ_BASE, 0x1_0000, seen.clone()).unwrap();
        (bus, seen)
    }

    #[test]
    fn a_call_is_an_access_of_the_callers_page() {
        let (bus, seen) = bench();
        let call =
            |function: u32, argument| carry_out(function.into(), || argument, &bus, VcpuId(3));
        assert_eq!(call(CALL_VERSION, None), 1);
        // A result is a number of 32 bits with a sign.
        assert_eq!(call(CALL_CUR_PERF, None), i64::from(i32::MAX));
        assert_eq!(call(CALL_SET_PERF, Some(700_000)), 0);
        assert_eq!(call(CALL_SET_PERF, None), -1);
        let expected = [(0x3000, None), (0x3004, Some(700_000))];
        assert_eq!(*seen.0.lock().unwrap(), expected);
    }

    #[test]
    fn what_is_forwarded_is_what_is_answered() {
        for calls in [Hypercalls::Forwarded, Hypercalls::WritesInKernel] {
            let answered = |function: &u32| Call::decode((*function).into()).is_some();
            assert!(calls.forwarded().iter().all(answered));
        }
        assert!(Hypercalls::None.forwarded().is_empty());
        assert!(
            !Hypercalls::WritesInKernel
                .forwarded()
                .contains(&CALL_SET_PERF)
        );
    }

    proptest! {
        #[test]
        fn any_other_call_is_not_supported(function: u64, argument: u32, vcpu: u16) {
            prop_assume!(Call::decode(function).is_none());
            let (bus, seen) = bench();
            prop_assert_eq!(carry_out(function, || Some(argument), &bus, VcpuId(vcpu)), -1);
            prop_assert!(seen.0.lock().unwrap().is_empty());
        }

        #[test]
        fn no_caller_panics(call in 0_u64..3, argument: Option<u32>, vcpu: u16) {
            let (bus, _) = bench();
            carry_out(u64::from(CALL_VERSION) + call, || argument, &bus, VcpuId(vcpu));
        }
    }
}
