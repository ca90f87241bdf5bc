package main

import (
	"context"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"
)

// TestEnded: what is stuck does not keep a process that is to end.
func TestEnded(t *testing.T) {
	ctx, stop := context.WithCancel(t.Context())
	if err := ended(ctx, func() {}, time.Hour); err != nil {
		t.Error(err)
	}
	stuck := make(chan struct{})
	defer close(stuck)
	stop()
	if err := ended(ctx, func() { <-stuck }, time.Millisecond); err == nil {
		t.Error("it says that all has ended")
	}
	if err := ended(ctx, func() {}, time.Hour); err != nil {
		t.Errorf("all ends in time: %v", err)
	}
}

// TestPodsAreLeftFirst: a successor hears that it may lead the node's pods once this process
// does so no more, or not for ever later.
func TestPodsAreLeftFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, tt := range []struct{ ends, want time.Duration }{{0, 0}, {time.Second, time.Second}, {time.Hour, podsTime}} {
			h := &handover{log: slog.New(slog.DiscardHandler), idle: make(chan struct{})}
			time.AfterFunc(tt.ends, func() { close(h.idle) })
			start := time.Now()
			h.leaveThePods()
			if took := time.Since(start); took != tt.want {
				t.Errorf("pods that are left after %s: told after %s, want %s", tt.ends, took, tt.want)
			}
		}
		start := time.Now()
		(&handover{}).leaveThePods() // it has none
		if took := time.Since(start); took != 0 {
			t.Errorf("a process without pods waits %s", took)
		}
	})
}
