// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises of what a device is made of and keeps: configurations and saved state are checked, a
//! reset takes requests back, and a saved device goes on elsewhere.

use super::*;

#[test]
fn a_request_of_0_is_none_to_reset_and_save() {
    let bench = bench(ClampMode::Exact);
    bench.write(0, REG_SET_PERF, 600_000);
    bench.write(0, REG_SET_PERF, 0);
    assert_eq!(bench.region.device().save().requests, []);
    let before = bench.events.all().len();
    bench.region.device().reset();
    assert_eq!(bench.events.all().len(), before, "nothing to take back");
}

#[test]
fn a_reset_takes_requests_back() {
    let bench = bench(ClampMode::Exact);
    bench.write(0, REG_SET_PERF, 600_000);
    bench.write(0, REG_PERFTBL_SEL, 2);
    bench.region.device().reset();
    assert_eq!(
        bench.actuator.applied().last(),
        Some(&(DomainId(7), Clamp::NONE))
    );
    assert_eq!(bench.actuator.applied().len(), 2, "domain 3 had no request");
    assert_eq!(bench.read(0, REG_PERFTBL_RD), LITTLE[0]);
    bench.write(1, REG_SET_PERF, 600_000);
    assert_eq!(bench.actuator.applied().len(), 3);
}

#[cfg(feature = "serde")]
#[test]
fn saved_state_is_data_for_any_snapshot() {
    let bench = bench(ClampMode::Floor);
    bench.write(0, REG_SET_PERF, 600_000);
    let state = bench.region.device().save();
    let text = serde_json::to_string(&state).unwrap();
    assert_eq!(serde_json::from_str::<DeviceState>(&text).unwrap(), state);
}

#[test]
fn a_saved_device_goes_on_elsewhere() {
    let old = bench(ClampMode::Floor);
    old.write(0, REG_SET_PERF, 600_000);
    old.write(1, REG_SET_PERF, 1_200_000);
    old.write(0, REG_PERFTBL_SEL, 1);
    assert_eq!(old.read(1, REG_CUR_PERF), 1_200_000);
    let state = old.region.device().save();

    let new = bench(ClampMode::Floor);
    new.source.set(None);
    let checked = CheckedState::try_from(state.clone()).unwrap();
    new.region.device().restore(&checked).unwrap();
    assert_eq!(new.floors(), [(7, 219)], "asked for again");
    assert_eq!(new.read(0, REG_PERFTBL_RD), LITTLE[1]);
    assert_eq!(new.read(1, REG_CUR_PERF), 1_200_000);
    let again = new.region.device().save();
    assert_eq!(again, state);
}

#[test]
fn a_reset_device_saves_no_request() {
    let bench = bench(ClampMode::Floor);
    bench.write(0, REG_SET_PERF, 600_000);
    bench.region.device().reset();
    assert_eq!(bench.region.device().save().requests, []);
}

#[test]
fn state_is_untrusted() {
    let bench = bench(ClampMode::Floor);
    let good = bench.region.device().save();
    let page = good.vcpus[0];
    let request = |domain, vcpu| RequestState {
        domain,
        vcpu,
        khz: 1,
    };
    let with_vcpus = |vcpus| DeviceState {
        vcpus,
        ..good.clone()
    };
    let with = |requests: &[(u32, u16)]| DeviceState {
        requests: requests.iter().map(|&(to, by)| request(to, by)).collect(),
        ..good.clone()
    };
    let refused = |state| CheckedState::try_from(state).unwrap_err();
    let none = refused(DeviceState::default());
    assert_eq!(none, StateError::VcpuCount { count: 0 });
    let too_many = refused(with_vcpus(vec![page; 513]));
    assert_eq!(too_many, StateError::VcpuCount { count: 513 });
    let domain = DomainId(7);
    let two_requests = refused(with(&[(7, 0), (7, 1)]));
    assert_eq!(two_requests, StateError::TwoRequests { domain });
    let (vcpu, count) = (VcpuId(3), 3);
    let no_such_vcpu = refused(with(&[(7, 3)]));
    assert_eq!(no_such_vcpu, StateError::NoSuchVcpu { vcpu, count });
    let mut still = good.clone();
    still.vcpus[1].cur_perf_khz = 0;
    assert_eq!(refused(still), StateError::ZeroPerf { vcpu: 1 });

    let restored = |state| {
        let state = CheckedState::try_from(state).unwrap();
        bench.region.device().restore(&state).unwrap_err()
    };
    let (count, expected) = (2, 3);
    let another = restored(with_vcpus(vec![page; 2]));
    assert_eq!(another, StateError::OtherDevice { count, expected });
    let (vcpu, domain) = (VcpuId(0), DomainId(3));
    let stranger = restored(with(&[(3, 0)]));
    assert_eq!(stranger, StateError::NotAMember { vcpu, domain });
    assert_eq!(bench.actuator.applied(), []);
}

#[test]
fn configurations_are_checked() {
    let make = |vcpus| {
        DeviceConfig {
            vcpus,
            ..config(ClampMode::Floor)
        }
        .check()
    };
    assert_eq!(make(vec![]), Err(ConfigError::VcpuCount { count: 0 }));
    let one = spec(1024, &BIG, 0);
    assert_eq!(make(vec![one.clone(); 512]), Ok(()));
    let count = 513;
    assert_eq!(
        make(vec![one.clone(); count]),
        Err(ConfigError::VcpuCount { count })
    );
    let nothing = spec(0, &BIG, 1);
    assert_eq!(
        make(vec![one.clone(), nothing]),
        Err(ConfigError::ZeroCapacity { vcpu: VcpuId(1) })
    );
    assert_eq!(
        make(vec![one, spec(1024, &LITTLE, 0)]),
        Err(ConfigError::UnequalDomain {
            domain: DomainId(0),
            first: VcpuId(0),
            second: VcpuId(1),
        })
    );
}
