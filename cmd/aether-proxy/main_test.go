package main

import (
	"context"
	"testing"
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
