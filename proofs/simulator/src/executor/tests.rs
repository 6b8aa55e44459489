//! A seed decides the schedule, only timers advance time, and endless runs are detected.

use super::*;

const LIMITS: RunLimits = RunLimits { steps: 100_000, seconds: 1_000 };

fn machine(seed: u64) -> Executor {
    Executor::new(Random::new(seed), Trace::default())
}

/// Runs eight tasks that take turns; returns their order and the number of polls.
fn config(seed: u64) -> (Vec<u32>, u64) {
    let (executor, trace) = (machine(seed), Trace::default());
    let executor = Executor::new(Random::new(seed), {
        drop(executor);
        trace.clone()
    });
    let (state, config) = (executor.clone(), Rc::new(RefCell::new(Vec::new())));
    let seen = Rc::clone(&config);
    let end = executor.run(LIMITS, async move {
        let tasks: Vec<_> = (0..8)
            .map(|i| {
                let (state, config) = (state.clone(), Rc::clone(&config));
                state.clone().spawn("turner", async move {
                    state.yield_now().await;
                    config.borrow_mut().push(i);
                })
            })
            .collect();
        for task in tasks {
            task.await;
        }
    });
    assert!(matches!(end, RunEnd::Finished(())));
    (seen.take(), trace.hash())
}

#[test]
fn a_seed_gives_one_schedule_and_other_seeds_give_others() {
    assert_eq!(config(1), config(1));
    assert!((2..10).any(|seed| config(seed) != config(1)));
}

#[test]
fn time_passes_only_by_timers_and_in_their_order() {
    let executor = machine(1);
    let state = executor.clone();
    let end = executor.run(LIMITS, async move {
        let slow = state.spawn("slow", {
            let state = state.clone();
            async move {
                state.delay(Duration::from_secs(5)).await;
                state.now()
            }
        });
        state.delay(Duration::from_secs(2)).await;
        assert_eq!(state.now(), Duration::from_secs(2));
        slow.await
    });
    assert!(matches!(end, RunEnd::Finished(at) if at == Duration::from_secs(5)));
}

#[test]
fn a_deadlock_is_reported_and_not_waited_for() {
    let executor = machine(1);
    let end = executor.run(LIMITS, std::future::pending::<()>());
    assert!(matches!(end, RunEnd::Stuck(Stuck::Deadlock { waiting }) if waiting == ["main"]));
}

#[test]
fn an_endless_run_is_stopped() {
    let executor = machine(1);
    let state = executor.clone();
    let end = executor.run(LIMITS, async move {
        loop {
            state.yield_now().await;
        }
        #[allow(unreachable_code)]
        ()
    });
    assert!(matches!(end, RunEnd::Stuck(Stuck::Endless { steps: 100_000, .. })));
}

#[test]
fn a_halted_machine_drops_all_it_ran() {
    let (executor, kept) = (machine(1), Rc::new(()));
    let (state, held) = (executor.clone(), Rc::clone(&kept));
    let end = executor.run(LIMITS, async move {
        let held_too = Rc::clone(&held);
        drop(state.spawn("holder", async move {
            std::future::pending::<()>().await;
            drop(held_too);
        }));
        state.delay(Duration::from_secs(1)).await;
        state.halt();
        state.delay(Duration::from_secs(1)).await;
        drop(held);
    });
    assert!(matches!(end, RunEnd::Halted));
    assert_eq!(Rc::strong_count(&kept), 1);
}
