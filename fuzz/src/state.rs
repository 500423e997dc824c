// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A device's state from a snapshot or another host: it is refused whole, or the device then saves
//! the same, and the requests are in force.

use vcpufreq_device::{CheckedState, Clamp, DeviceState, RequestState, SET_PERF_KHZ, VcpuState};

use crate::machine::{VCPUS, check, clamp_of, device};

/// The first byte has the numbers of vCPUs and requests; each takes some of what follows.
pub fn state(data: &[u8]) {
    let mut words = data.chunks(4).map(|word| {
        let mut bytes = [0; 4];
        bytes[..word.len()].copy_from_slice(word);
        u32::from_le_bytes(bytes)
    });
    let counts = words.next().unwrap_or_default();
    let mut word = || words.next().unwrap_or_default();
    // Three most often, and up to more than a device has.
    let vcpus = match counts & 7 {
        0 => ((counts >> 8) & 0x3ff) as usize,
        1 => ((counts >> 8) & 3) as usize,
        _ => VCPUS.len(),
    };
    let state = DeviceState {
        vcpus: (0..vcpus)
            .map(|_| VcpuState {
                perftbl_sel: word(),
                cur_perf_khz: word(),
            })
            .collect(),
        requests: (0..(counts >> 3) & 3)
            .map(|_| RequestState {
                domain: word() % 4,
                vcpu: u16::try_from(word() % 5).unwrap_or_default(),
                khz: word(),
            })
            .collect(),
    };
    let device = device();
    let Ok(checked) = CheckedState::try_from(state.clone()) else {
        return;
    };
    if device.restore(&checked).is_err() {
        check(&device, [Clamp::NONE; 2], &state);
        assert!(device.save().requests.is_empty());
        return;
    }
    let saved = device.save();
    assert_eq!(saved.vcpus, state.vcpus);
    let mut clamps = [Clamp::NONE; 2];
    for request in &state.requests {
        // No request of a snapshot is a ceiling.
        let khz = request.khz.min(SET_PERF_KHZ);
        let restored = RequestState { khz, ..*request };
        assert_eq!(khz != 0, saved.requests.contains(&restored), "{state:?}");
        let (domain, clamp) = clamp_of(request.vcpu.into(), khz);
        clamps[domain] = clamp;
    }
    check(&device, clamps, &state);
}
