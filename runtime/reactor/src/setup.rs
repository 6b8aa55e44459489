//! Setting up a ring with as much as the kernel grants, and saying what it did not.

use std::sync::Arc;

use io_uring::{IoUring, Probe, opcode};
use sealblock_runtime_memory::Pool;

use crate::backend::{Features, TaskrunMode, UringUnavailable};
use crate::config::Config;
use crate::remote::ReactorShared;
use crate::ring::{Ring, SUBMISSION_ENTRIES, Tables};
use crate::spin::Spin;

/// The most that one registered buffer holds, in bytes.
const REGISTERED_LIMIT_BYTES: usize = 1 << 30;
/// Completions beyond those of counted operations: for sockets that become ready together, cancellations, and the read of
/// the event descriptor. More than these go to a list in the kernel, which is slower.
const COMPLETION_MARGIN: u32 = 1024;

pub(crate) fn ring(
    config: &Config,
    pool: &Pool,
    remote: &Arc<ReactorShared>,
) -> Result<(Ring, Features), UringUnavailable> {
    if let Some(errno) = config.refuse_uring {
        return Err(UringUnavailable::Errno(errno));
    }
    let limit = config.operations_in_flight_limit.max(1);
    let (uring, completion) = build(limit, config.best_completion)?;
    check(&uring)?;
    let fixed_files = register_files(&uring, config.fixed_files_limit);
    let fixed_buffers = register_arena(&uring, pool);
    let slots = if fixed_files.is_ok() { config.fixed_files_limit } else { 0 };
    let tables = Tables {
        arena: fixed_buffers.is_ok().then(|| pool.arena().id),
        given_up: Arc::default(),
        free_slots: (0..slots).rev().collect(),
    };
    let spin = Spin::new(config.spin_us);
    let ring = Ring::new(uring, tables, limit as usize, spin, Arc::clone(remote));
    Ok((ring, Features { completion, fixed_files, fixed_buffers }))
}

/// Tries the best set-up first; a kernel that does not know a flag says `EINVAL`.
fn build(limit: u32, best: TaskrunMode) -> Result<(IoUring, TaskrunMode), UringUnavailable> {
    let mut refusal = UringUnavailable::Errno(libc::EINVAL);
    let ways = [TaskrunMode::Deferred, TaskrunMode::Cooperative, TaskrunMode::Plain];
    for completion in ways.into_iter().skip_while(|&way| way != best) {
        let mut builder = IoUring::builder();
        builder.dontfork().setup_clamp().setup_cqsize(limit.max(SUBMISSION_ENTRIES) + COMPLETION_MARGIN);
        match completion {
            TaskrunMode::Deferred => {
                builder.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag().setup_submit_all()
            }
            TaskrunMode::Cooperative => builder.setup_coop_taskrun().setup_taskrun_flag().setup_submit_all(),
            TaskrunMode::Plain => &mut builder,
        };
        match builder.build(SUBMISSION_ENTRIES) {
            Ok(uring) => return Ok((uring, completion)),
            Err(error) => refusal = UringUnavailable::Errno(error.raw_os_error().unwrap_or(libc::EIO)),
        }
        if refusal != UringUnavailable::Errno(libc::EINVAL) {
            break;
        }
    }
    Err(refusal)
}

/// Refuses kernels whose rings cannot do what every reactor needs.
fn check(uring: &IoUring) -> Result<(), UringUnavailable> {
    if !uring.params().is_feature_ext_arg() {
        return Err(UringUnavailable::Lacks("io_uring waits with a timeout (Linux 5.11)"));
    }
    if !uring.params().is_feature_nodrop() {
        return Err(UringUnavailable::Lacks("io_uring completions that are never dropped (Linux 5.5)"));
    }
    let mut probe = Probe::new();
    uring.submitter().register_probe(&mut probe).map_err(|_| UringUnavailable::Lacks("the io_uring probe"))?;
    let needed = [
        opcode::Read::CODE,
        opcode::Write::CODE,
        opcode::ReadFixed::CODE,
        opcode::WriteFixed::CODE,
        opcode::Fsync::CODE,
        opcode::Fallocate::CODE,
        opcode::Accept::CODE,
        opcode::Connect::CODE,
        opcode::Recv::CODE,
        opcode::Send::CODE,
        opcode::SendMsg::CODE,
        opcode::AsyncCancel::CODE,
    ];
    if needed.iter().any(|&code| !probe.is_supported(code)) {
        return Err(UringUnavailable::Lacks("a file or socket operation of io_uring"));
    }
    Ok(())
}

fn register_files(uring: &IoUring, limit: u32) -> Result<(), UringUnavailable> {
    if limit == 0 {
        return Err(UringUnavailable::TurnedOff);
    }
    let registered = uring.submitter().register_files_sparse(limit);
    registered.map_err(|error| UringUnavailable::Errno(error.raw_os_error().unwrap_or(libc::EIO)))
}

fn register_arena(uring: &IoUring, pool: &Pool) -> Result<(), UringUnavailable> {
    let arena = pool.arena();
    if arena.len_bytes == 0 {
        return Err(UringUnavailable::TurnedOff);
    }
    if arena.len_bytes > REGISTERED_LIMIT_BYTES {
        return Err(UringUnavailable::ArenaTooLarge);
    }
    let vectors = [libc::iovec { iov_base: arena.base.cast(), iov_len: arena.len_bytes }];
    // SAFETY: the arena is mapped for as long as the pool or any buffer of it lives; the reactor holds the pool, and an
    // operation its buffer. The kernel holds the pages themselves, so even an early unmapping would free nothing in use.
    let registered = unsafe { uring.submitter().register_buffers(&vectors) };
    match registered {
        Ok(()) => {
            pool.set_registration(Some(0));
            Ok(())
        }
        Err(error) => Err(match error.raw_os_error() {
            Some(libc::ENOMEM) => locked_memory(),
            errno => UringUnavailable::Errno(errno.unwrap_or(libc::EIO)),
        }),
    }
}

fn locked_memory() -> UringUnavailable {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the call fills the structure it is given.
    match unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut limit) } {
        0 => UringUnavailable::LockedMemory { limit_bytes: limit.rlim_cur },
        _ => UringUnavailable::Errno(libc::ENOMEM),
    }
}
