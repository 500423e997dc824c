// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What programs on the host set beside a guest's requests: floors and ceilings of its vCPUs, each for
//! a time. Of a domain's floors the highest counts, of its ceilings the lowest. A floor above the
//! ceiling is lowered to the ceiling.
//!
//! No clock and no host call are here: the caller passes the time and applies the bounds.

use std::time::Duration;

use vcpufreq_device::{
    ActuateError, Clamp, ClampMode, DeviceConfig, DomainId, Khz, VcpuId, VcpuSpec, clamp,
};

/// How long a tuning may hold at most, unless it is extended.
pub const TUNED_AT_MOST: Duration = Duration::from_secs(3600);
/// Tunings of a VM at once.
pub const TUNINGS_AT_MOST: usize = 1024;

/// The program that a tuning is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TuneClient {
    /// Its user.
    pub user: u32,
    /// Its process.
    pub pid: u32,
    /// Its connection: its tunings end with that.
    pub connection: u64,
}

/// What a program wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TuneRequest {
    /// The vCPU, whose whole domain is tuned.
    pub vcpu: VcpuId,
    /// The domain's requests count as this at least.
    pub floor: Option<Khz>,
    /// And as this at most.
    pub ceiling: Option<Khz>,
    /// For so long.
    pub lasts: Duration,
}

/// A floor, a ceiling or both, in force until its time, its client or a call ends it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// Its number, above 0; used once, also by a later VM of the same process.
    pub handle: u64,
    /// What is wanted.
    pub request: TuneRequest,
    /// Its domain.
    pub domain: DomainId,
    /// When it ends, in ns of the caller's clock.
    pub until_ns: u64,
    /// Whose it is.
    pub client: TuneClient,
}

/// What has ended a tuning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TuneEnd {
    /// Its time.
    Time,
    /// A call.
    Untuned,
    /// The end of its client.
    Client,
}

/// Why nothing was tuned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TuneError {
    /// There is no such vCPU.
    #[error("there is no vCPU {vcpu}; the last one is {last}")]
    NoVcpu {
        /// The vCPU.
        vcpu: VcpuId,
        /// The last one that there is.
        last: usize,
    },
    /// Neither a floor nor a ceiling.
    #[error("nothing is wanted; give a floor or a ceiling")]
    Nothing,
    /// A frequency that the vCPU doesn't have.
    #[error("vCPU {vcpu} has no {khz}; give {min} to {max}")]
    OutOfRange {
        /// The vCPU.
        vcpu: VcpuId,
        /// The frequency.
        khz: Khz,
        /// The lowest that it has.
        min: Khz,
        /// The highest one.
        max: Khz,
    },
    /// A floor above its ceiling.
    #[error("the floor of {floor} is above the ceiling of {ceiling}")]
    Crossed {
        /// The floor.
        floor: Khz,
        /// The ceiling.
        ceiling: Khz,
    },
    /// No time, or too long a one.
    #[error("a tuning lasts 1 ms to {} s", TUNED_AT_MOST.as_secs())]
    Lasts,
    /// No tuning has this handle: it has ended, or never was.
    #[error("no tuning {handle} is in force")]
    NoHandle {
        /// The handle.
        handle: u64,
    },
    /// The VM has as many as it can.
    #[error("{TUNINGS_AT_MOST} tunings are in force; end one")]
    TooMany,
    /// The host clamps nothing.
    #[error("nothing clamps this VM's vCPUs: it runs with --actuator none")]
    NoClamps,
    /// The host has clamped nothing.
    #[error("nothing is tuned: {0}")]
    NotClamped(ActuateError),
}

/// The tunings of a VM.
#[derive(Debug, Default)]
pub(crate) struct Tunings {
    all: Vec<Tuning>,
    last: u64,
}

impl Tunings {
    /// Adds one at `now_ns`.
    ///
    /// # Errors
    /// The rule that `request` breaks; nothing has changed then.
    pub fn add(
        &mut self,
        config: &DeviceConfig,
        (request, client): (TuneRequest, TuneClient),
        now_ns: u64,
    ) -> Result<Tuning, TuneError> {
        let spec = check(config, &request)?;
        if self.all.len() >= TUNINGS_AT_MOST {
            return Err(TuneError::TooMany);
        }
        let until_ns = end(request.lasts, now_ns)?;
        // From the time in µs on: a later VM of this process uses none again.
        self.last = (self.last + 1).max(now_ns / 1000);
        let tuning = Tuning {
            handle: self.last,
            request,
            domain: spec.domain,
            until_ns,
            client,
        };
        self.all.push(tuning);
        Ok(tuning)
    }

    /// Has one last for `lasts` from `now_ns` on.
    ///
    /// # Errors
    /// [`TuneError::NoHandle`], [`TuneError::Lasts`].
    pub fn extend(&mut self, handle: u64, lasts: Duration, now_ns: u64) -> Result<(), TuneError> {
        let mut all = self.all.iter_mut();
        let tuning = all.find(|tuning| tuning.handle == handle);
        let tuning = tuning.ok_or(TuneError::NoHandle { handle })?;
        tuning.until_ns = end(lasts, now_ns)?;
        Ok(())
    }

    /// Takes those away that `ends` picks.
    pub fn take(&mut self, mut ends: impl FnMut(&Tuning) -> bool) -> Vec<Tuning> {
        let (ended, left) = self.all.iter().partition(|tuning| ends(tuning));
        self.all = left;
        ended
    }

    /// Those in force.
    pub fn all(&self) -> &[Tuning] {
        &self.all
    }

    /// What they keep the clamps of `domain` within.
    pub fn bounds(&self, config: &DeviceConfig, domain: DomainId) -> Clamp {
        let of_domain = self.all.iter().filter(|tuning| tuning.domain == domain);
        let bounds = of_domain.fold(Clamp::NONE, |bounds, tuning| {
            let request = &tuning.request;
            let spec = config.vcpus.get(request.vcpu.index());
            let util = |khz| {
                let headroom = config.headroom;
                spec.map(|spec| clamp(spec, khz, ClampMode::Exact, headroom).clamp.min)
            };
            let floor = request.floor.and_then(util).unwrap_or(bounds.min);
            let ceiling = request.ceiling.and_then(util).unwrap_or(bounds.max);
            Clamp {
                min: bounds.min.max(floor),
                max: bounds.max.min(ceiling),
            }
        });
        Clamp {
            min: bounds.min.min(bounds.max),
            ..bounds
        }
    }
}

fn check<'a>(config: &'a DeviceConfig, request: &TuneRequest) -> Result<&'a VcpuSpec, TuneError> {
    let TuneRequest {
        vcpu,
        floor,
        ceiling,
        ..
    } = *request;
    let spec = config.vcpus.get(vcpu.index()).ok_or(TuneError::NoVcpu {
        vcpu,
        last: config.vcpus.len().saturating_sub(1),
    })?;
    let max = spec.table.max();
    let min = match spec.table.entries() {
        [lowest, _, ..] => *lowest,
        _ => Khz(1),
    };
    if floor.is_none() && ceiling.is_none() {
        return Err(TuneError::Nothing);
    }
    for khz in [floor, ceiling].into_iter().flatten() {
        if khz < min || khz > max {
            return Err(TuneError::OutOfRange {
                vcpu,
                khz,
                min,
                max,
            });
        }
    }
    match (floor, ceiling) {
        (Some(floor), Some(ceiling)) if floor > ceiling => {
            Err(TuneError::Crossed { floor, ceiling })
        }
        _ => Ok(spec),
    }
}

fn end(lasts: Duration, now_ns: u64) -> Result<u64, TuneError> {
    if lasts < Duration::from_millis(1) || lasts > TUNED_AT_MOST {
        return Err(TuneError::Lasts);
    }
    let lasts = u64::try_from(lasts.as_nanos()).unwrap_or(u64::MAX);
    Ok(now_ns.saturating_add(lasts))
}

#[cfg(test)]
mod tests {
    //! Promises: the highest floor and the lowest ceiling of a domain count, and above a ceiling no
    //! floor; another domain has its own. A handle is used once. What is no tuning changes nothing.

    use super::*;
    use vcpufreq_device::{PerfTable, Util};

    const CLIENT: TuneClient = TuneClient {
        user: 0,
        pid: 7,
        connection: 1,
    };

    /// vCPUs 0 and 1 are one domain, vCPU 2 another.
    fn config() -> DeviceConfig {
        let spec = |domain| VcpuSpec {
            table: PerfTable::try_from(vec![Khz(256), Khz(512), Khz(1024)]).unwrap(),
            capacity: Util::MAX,
            domain: DomainId(domain),
        };
        DeviceConfig::new(vec![spec(0), spec(0), spec(2)])
    }

    fn request(vcpu: u16, floor: Option<u32>, ceiling: Option<u32>) -> TuneRequest {
        TuneRequest {
            vcpu: VcpuId(vcpu),
            floor: floor.map(Khz),
            ceiling: ceiling.map(Khz),
            lasts: Duration::from_millis(200),
        }
    }

    fn bounds(tunings: &Tunings, domain: u32) -> (u16, u16) {
        let bounds = tunings.bounds(&config(), DomainId(domain));
        (bounds.min.get(), bounds.max.get())
    }

    #[test]
    fn the_highest_floor_and_the_lowest_ceiling_count() {
        let mut tunings = Tunings::default();
        let mut handles = Vec::new();
        let rows = [
            (request(0, Some(300), None), (300, 1024)),
            (request(1, Some(600), None), (600, 1024)),
            (request(0, Some(400), Some(900)), (600, 900)),
            (request(1, None, Some(700)), (600, 700)),
            // A ceiling is above each floor.
            (request(1, None, Some(500)), (500, 500)),
        ];
        for (request, expected) in rows {
            let added = tunings.add(&config(), (request, CLIENT), 0).unwrap();
            handles.push(added.handle);
            assert_eq!(bounds(&tunings, 0), expected, "{request:?}");
        }
        assert_eq!(bounds(&tunings, 2), (0, 1024));
        assert_eq!(handles, [1, 2, 3, 4, 5]);
        for (handle, left) in [(5, (600, 700)), (2, (400, 700)), (4, (400, 900))] {
            let ended = tunings.take(|tuning| tuning.handle == handle);
            assert_eq!((ended.len(), bounds(&tunings, 0)), (1, left));
        }
        let again = tunings.add(&config(), (request(2, Some(256), None), CLIENT), 0);
        assert_eq!(again.unwrap().handle, 6);
    }

    // A program that ends its tuning late would end another one's.
    #[test]
    fn a_later_vm_has_other_handles() {
        let made = |tunings: &mut Tunings, now_ns| {
            let one = (request(0, Some(300), None), CLIENT);
            tunings.add(&config(), one, now_ns).unwrap().handle
        };
        let (mut one, mut later) = (Tunings::default(), Tunings::default());
        let handles = [5_000_000, 5_000_000, 5_000_900].map(|now_ns| made(&mut one, now_ns));
        assert_eq!(handles, [5_000, 5_001, 5_002]);
        assert_eq!(made(&mut later, 6_000_000), 6_000);
    }

    #[test]
    fn a_tuning_lasts_as_long_as_it_was_last_extended() {
        let mut tunings = Tunings::default();
        let tuned = tunings.add(&config(), (request(0, Some(300), None), CLIENT), 5);
        let tuned = tuned.unwrap();
        assert_eq!(tuned.until_ns, 200_000_005);
        tunings.extend(1, Duration::from_millis(1), 100).unwrap();
        assert_eq!(tunings.all()[0].until_ns, 1_000_100);
        assert_eq!(tunings.take(|tuning| tuning.until_ns <= 1_000_099), []);
        assert_eq!(tunings.take(|tuning| tuning.until_ns <= 1_000_100).len(), 1);
        let gone = tunings.extend(1, Duration::from_millis(1), 100);
        assert_eq!(gone, Err(TuneError::NoHandle { handle: 1 }));
    }

    #[test]
    fn what_is_no_tuning_changes_nothing() {
        let mut tunings = Tunings::default();
        let lasts = |lasts| TuneRequest {
            lasts,
            ..request(0, Some(300), None)
        };
        let rows = [
            (
                request(3, Some(300), None),
                "there is no vCPU 3; the last one is 2",
            ),
            (request(0, None, None), "give a floor or a ceiling"),
            (
                request(0, Some(255), None),
                "no 255 kHz; give 256 kHz to 1024 kHz",
            ),
            (request(0, None, Some(1025)), "no 1025 kHz"),
            (request(0, Some(0), None), "no 0 kHz"),
            (
                request(0, Some(600), Some(500)),
                "is above the ceiling of 500 kHz",
            ),
            (lasts(Duration::ZERO), "lasts 1 ms to 3600 s"),
            (lasts(Duration::from_secs(3601)), "lasts 1 ms to 3600 s"),
        ];
        for (request, said) in rows {
            let error = tunings.add(&config(), (request, CLIENT), 0).unwrap_err();
            assert!(error.to_string().contains(said), "{error}");
            assert_eq!(tunings.all(), []);
        }
        for _ in 0..TUNINGS_AT_MOST {
            let one = (request(0, Some(300), None), CLIENT);
            tunings.add(&config(), one, 0).unwrap();
        }
        let one = (request(0, Some(300), None), CLIENT);
        assert_eq!(tunings.add(&config(), one, 0), Err(TuneError::TooMany));
    }
}
