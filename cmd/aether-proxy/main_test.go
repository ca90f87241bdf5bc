package main

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"aether/dataplane/relay"
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

// TestTCPSettings: the cuts of raw TCP are off unless they are asked for, and what is no time that the kernel can
// count is refused with its name.
func TestTCPSettings(t *testing.T) {
	for _, tt := range []struct {
		user, idle time.Duration
		refused    string
	}{
		{},
		{user: time.Second, idle: 576 * time.Hour},
		{user: 30 * time.Second},
		{user: -time.Second, refused: "--tcp-user-timeout"},
		{user: 999 * time.Millisecond, refused: "--tcp-user-timeout"},
		{user: 577 * time.Hour, refused: "--tcp-user-timeout"},
		{idle: time.Nanosecond, refused: "--tcp-idle-timeout"},
		{idle: -time.Hour, refused: "--tcp-idle-timeout"},
	} {
		o := options{userTimeout: tt.user, idleTimeout: tt.idle}
		got, err := o.relay()
		switch {
		case tt.refused == "" && (err != nil || got != relay.Options{UserTimeout: tt.user, Idle: tt.idle}):
			t.Errorf("%+v: %+v, %v", tt, got, err)
		case tt.refused != "" && (err == nil || !strings.Contains(err.Error(), tt.refused+": ")):
			t.Errorf("%+v: %v", tt, err)
		}
	}
}
