//! Random splits, joins, freezes and drops against a model that knows every allocation's handles.

use proptest::prelude::*;
use sealblock_runtime_memory::{Buffer, Pool, Slice};

enum Handle {
    Unique(Buffer),
    Shared(Slice),
}

/// What the model knows about a handle: its allocation, where in it the range starts, and the bytes.
struct Known {
    handle: Handle,
    allocation: usize,
    offset: usize,
    bytes: Vec<u8>,
}

#[derive(Clone, Debug)]
enum Step {
    Take { len: usize, heap: bool },
    Split { at: prop::sample::Index, front: bool },
    Join { other: prop::sample::Index },
    Fill(u8),
    Truncate(prop::sample::Index),
    Freeze,
    Narrow(prop::sample::Index, prop::sample::Index),
    Unfreeze,
    Drop,
}

fn step() -> impl Strategy<Value = Step> {
    use prop::sample::Index;
    prop_oneof![
        1 => (0usize..9000, any::<bool>()).prop_map(|(len, heap)| Step::Take { len, heap }),
        3 => (any::<Index>(), any::<bool>()).prop_map(|(at, front)| Step::Split { at, front }),
        3 => any::<Index>().prop_map(|other| Step::Join { other }),
        1 => any::<u8>().prop_map(Step::Fill),
        1 => any::<Index>().prop_map(Step::Truncate),
        1 => Just(Step::Freeze),
        1 => (any::<Index>(), any::<Index>()).prop_map(|(a, b)| Step::Narrow(a, b)),
        2 => Just(Step::Unfreeze),
        1 => Just(Step::Drop),
    ]
}

struct Model {
    pool: Pool,
    known: Vec<Known>,
    allocations: usize,
}

impl Model {
    fn take(&mut self, len: usize, heap: bool) {
        let mut buffer = if heap { Buffer::zeroed(len) } else { self.pool.take(len) };
        if heap {
            assert!(buffer.iter().all(|&byte| byte == 0));
        }
        buffer.fill(self.allocations as u8);
        self.allocations += 1;
        let bytes = vec![(self.allocations - 1) as u8; len];
        self.known.push(Known { handle: Handle::Unique(buffer), allocation: self.allocations, offset: 0, bytes });
    }

    fn split(&mut self, index: usize, at: prop::sample::Index, front: bool) {
        let known = &mut self.known[index];
        let Handle::Unique(buffer) = &mut known.handle else { return };
        let at = at.index(buffer.len() + 1);
        let (handle, offset, bytes) = if front {
            let piece = buffer.split_to(at);
            let tail = known.bytes.split_off(at);
            let offset = known.offset;
            known.offset += at;
            (piece, offset, std::mem::replace(&mut known.bytes, tail))
        } else {
            (buffer.split_off(at), known.offset + at, known.bytes.split_off(at))
        };
        let allocation = known.allocation;
        self.known.push(Known { handle: Handle::Unique(handle), allocation, offset, bytes });
    }

    fn join(&mut self, first: usize, second: usize) {
        if first == second {
            return;
        }
        let both = |known: &Known| matches!(known.handle, Handle::Unique(_));
        if !both(&self.known[first]) || !both(&self.known[second]) {
            return;
        }
        let b = self.known.swap_remove(second);
        let first = if first == self.known.len() { second } else { first };
        let a = self.known.swap_remove(first);
        let adjacent = a.allocation == b.allocation && a.offset + a.bytes.len() == b.offset;
        let expected = adjacent || a.bytes.is_empty() || b.bytes.is_empty();
        let (Handle::Unique(x), Handle::Unique(y)) = (a.handle, b.handle) else { unreachable!("checked above") };
        match x.try_join(y) {
            Ok(joined) => {
                assert!(expected, "ranges that are not neighbours were joined");
                let (allocation, offset) = if a.bytes.is_empty() && !b.bytes.is_empty() {
                    (b.allocation, b.offset)
                } else {
                    (a.allocation, a.offset)
                };
                let bytes = [a.bytes, b.bytes].concat();
                self.known.push(Known { handle: Handle::Unique(joined), allocation, offset, bytes });
            }
            Err((x, y)) => {
                assert!(!expected, "neighbours were not joined");
                self.known.push(Known { handle: Handle::Unique(x), ..a });
                self.known.push(Known { handle: Handle::Unique(y), ..b });
            }
        }
    }

    fn unfreeze(&mut self, index: usize) {
        let Known { handle, allocation, offset, bytes } = self.known.swap_remove(index);
        let handle = match handle {
            Handle::Shared(slice) => {
                // The pool and the heap allocate nothing for an empty slice, so it is always the only handle.
                let alone = self.known.iter().all(|known| known.allocation != allocation);
                match slice.try_unfreeze() {
                    Ok(buffer) => {
                        assert!(alone || bytes.is_empty(), "unfrozen although others share the allocation");
                        Handle::Unique(buffer)
                    }
                    Err(slice) => {
                        assert!(!alone, "the only handle was not unfrozen");
                        Handle::Shared(slice)
                    }
                }
            }
            unique => unique,
        };
        self.known.push(Known { handle, allocation, offset, bytes });
    }

    fn apply(&mut self, index: prop::sample::Index, step: Step) {
        if let Step::Take { len, heap } = step {
            return self.take(len, heap);
        }
        if self.known.is_empty() {
            return;
        }
        let index = index.index(self.known.len());
        let known = &mut self.known[index];
        match (step, &mut known.handle) {
            (Step::Split { at, front }, _) => self.split(index, at, front),
            (Step::Join { other }, _) => self.join(index, other.index(self.known.len())),
            (Step::Unfreeze, _) => self.unfreeze(index),
            (Step::Drop, _) => drop(self.known.swap_remove(index)),
            (Step::Fill(byte), Handle::Unique(buffer)) => {
                buffer.fill(byte);
                known.bytes.fill(byte);
            }
            (Step::Truncate(len), Handle::Unique(buffer)) => {
                let len = len.index(buffer.len() + 2);
                buffer.truncate(len);
                known.bytes.truncate(len);
            }
            (Step::Freeze, Handle::Unique(buffer)) => known.handle = Handle::Shared(std::mem::take(buffer).freeze()),
            (Step::Narrow(a, b), Handle::Shared(slice)) => {
                let (a, b) = (a.index(slice.len() + 1), b.index(slice.len() + 1));
                let (a, b) = (a.min(b), a.max(b));
                let handle = Handle::Shared(slice.slice(a..b));
                let (allocation, offset, bytes) = (known.allocation, known.offset + a, known.bytes[a..b].to_vec());
                self.known.push(Known { handle, allocation, offset, bytes });
            }
            _ => {}
        }
    }

    fn check(&self) {
        for known in &self.known {
            let bytes: &[u8] = match &known.handle {
                Handle::Unique(buffer) => buffer,
                Handle::Shared(slice) => slice,
            };
            assert_eq!(bytes, known.bytes);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        cases: if cfg!(miri) { 6 } else { 512 },
        ..ProptestConfig::default()
    })]

    #[test]
    fn handles_behave_like_the_model(steps in prop::collection::vec((any::<prop::sample::Index>(), step()), 1..120)) {
        let mut model = Model { pool: Pool::new(1 << 20, usize::MAX), known: Vec::new(), allocations: 0 };
        for (index, step) in steps {
            model.apply(index, step);
            model.check();
        }
        model.known.clear();
        let counters = model.pool.counters();
        prop_assert_eq!((counters.in_use_bytes, counters.heap_bytes), (0, 0));
    }
}
