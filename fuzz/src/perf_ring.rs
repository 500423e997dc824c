// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The kernel's records of a guest's writes, in two threads' rings, which are overwritten, and the
//! text that describes a record. Against a model: a look finds the newest of what a ring keeps, and
//! claims nothing where that may be missing. What isn't a record may hide others, and no more.

use vcpufreq_bridge::fuzzing::FakeTrace;
use vcpufreq_bridge::ioeventfd::{LastWrite, TraceProgress};
use vcpufreq_device::VcpuId;

use crate::operations;

const FORMAT: &str = "\tfield:u64 gpa;\toffset:16;\tsize:8;\tsigned:0;\n\
    \tfield:u64 val;\toffset:24;\tsize:8;\tsigned:0;\n";
const BASE: u64 = 0x0a00_0000;
/// Bytes of a ring that count.
const LAST: usize = 2048;
const WANTED: [VcpuId; 2] = [VcpuId(0), VcpuId(2)];
/// Bytes of a step: what, whose, and a value.
const STEP: usize = 4;

/// What is known of a ring.
#[derive(Clone, Default)]
struct RingModel {
    /// Since the last look, the newest last: bytes, and the write if it is wanted.
    records: Vec<(usize, Option<LastWrite>)>,
    newest: Option<LastWrite>,
    lost: bool,
    /// Something else was written into it.
    spoilt: bool,
}

impl RingModel {
    fn look(&mut self) {
        let mut left = LAST;
        for (len, write) in std::mem::take(&mut self.records).into_iter().rev() {
            if len > left {
                self.lost = true;
                return;
            }
            if write.is_some() {
                (self.newest, self.lost) = (write, false);
                return;
            }
            left -= len;
        }
    }
}

/// Fills the rings, and looks.
pub fn perf_ring(data: &[u8]) {
    // As a format too.
    let _ = FakeTrace::new(0, &String::from_utf8_lossy(data), BASE);
    let mut trace = FakeTrace::new(2, FORMAT, BASE).expect("a format that holds");
    let (mut models, mut known) = (
        [RingModel::default(), RingModel::default()],
        TraceProgress::new(),
    );
    for (at_ns, step) in (1..).zip(data.chunks_exact(STEP)) {
        operations::count();
        let &[what, whose, v0, v1] = step else {
            continue;
        };
        let (thread, value) = (usize::from(what & 1), u16::from_le_bytes([v0, v1]));
        match (what >> 1) & 7 {
            0..=4 => {
                // Most are of set_perf, of five vCPUs.
                let vcpu = u16::from(whose % 5);
                let register = if whose < 200 { 4 } else { 0x0c };
                let padding = usize::from(whose / 8 % 3) * 8;
                let gpa = BASE + u64::from(vcpu) * 0x1000 + register;
                let record = record(at_ns, (gpa, value.into()), padding);
                trace.write(thread, &record);
                let write = LastWrite {
                    vcpu: VcpuId(vcpu),
                    khz: value.into(),
                    at_ns,
                };
                let wanted = register == 4 && WANTED.contains(&write.vcpu);
                let model = &mut models[thread];
                model
                    .records
                    .push((record.len(), Some(write).filter(|_| wanted)));
            }
            // Bytes of the input, in words.
            5 => {
                let len = usize::from(value % 512) * 8;
                let bytes: Vec<u8> = data.iter().copied().cycle().take(len).collect();
                trace.write(thread, &bytes);
                models[thread].spoilt |= len > 0;
            }
            _ => look(&trace, &mut models, &mut known),
        }
    }
    look(&trace, &mut models, &mut known);
}

fn look(trace: &FakeTrace, models: &mut [RingModel; 2], known: &mut TraceProgress) {
    let newest = trace.order().newest(&WANTED, known);
    models.iter_mut().for_each(RingModel::look);
    if models.iter().any(|model| model.spoilt) {
        return;
    }
    let lost = models.iter().any(|model| model.lost);
    let of_rings = models.iter().filter_map(|model| model.newest);
    let expected = of_rings.max_by_key(|write| write.at_ns).filter(|_| !lost);
    assert_eq!(newest, expected);
}

/// `PERF_RECORD_SAMPLE` of time and fields.
fn record(at_ns: u64, (gpa, value): (u64, u64), padding: usize) -> Vec<u8> {
    let mut fields = vec![0; 16];
    fields.extend(gpa.to_ne_bytes());
    fields.extend(value.to_ne_bytes());
    fields.resize(fields.len() + padding + 4, 0);
    let len = 20 + fields.len();
    let mut record = 9_u32.to_ne_bytes().to_vec();
    record.extend([0, 0]);
    record.extend(u16::try_from(len).expect("a short record").to_ne_bytes());
    record.extend(at_ns.to_ne_bytes());
    record.extend(
        u32::try_from(fields.len())
            .expect("few fields")
            .to_ne_bytes(),
    );
    record.extend(fields);
    record
}
