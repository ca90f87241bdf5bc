package controlplane

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"

	"aether/dataplane/model"
	"aether/dataplane/snapshot"
)

type target struct {
	snaps []*snapshot.Snapshot
	pods  int
}

func (t *target) Apply(s *snapshot.Snapshot, w []model.Workload) {
	t.snaps = append(t.snaps, s)
	t.pods = len(w)
}

func TestPublish(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		give := make(chan *model.Mesh)
		bad := []model.Problem{{Object: "Pod shop/x", Where: "a.yaml:3", Reason: "no"}}
		source := func(ctx context.Context, on func(*model.Mesh, []model.Problem)) error {
			for {
				select {
				case m := <-give:
					on(m, bad)
				case <-ctx.Done():
					return nil
				}
			}
		}
		tg := &target{}
		l := New(source, tg, slog.New(slog.NewTextHandler(&log, nil)))
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error)
		go func() { done <- l.Run(ctx) }()

		waited := make(chan error, 1)
		go func() { waited <- l.Wait(ctx, 2) }()
		give <- &model.Mesh{Domain: "aether.internal", TrustDomain: "td"}
		synctest.Wait()
		select {
		case <-waited:
			t.Fatal("sequence number 2 is in force after one publish")
		default:
		}
		if len(tg.snaps) != 1 || tg.snaps[0].Version() != 1 {
			t.Fatalf("%d snapshots", len(tg.snaps))
		}
		give <- &model.Mesh{Domain: "aether.internal", TrustDomain: "td", Workloads: []model.Workload{{
			Namespace: "shop", Name: "web-1", Account: "web", ContainerID: "c", SPIFFEID: "spiffe://td/ns/shop/sa/web",
		}}}
		if err := <-waited; err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		s := l.State()
		if s.Seq != 2 || tg.pods != 1 || tg.snaps[1].Version() != 2 || len(s.Problems) == 0 || s.Problems[0] != bad[0] {
			t.Errorf("%+v, %d pods", s, tg.pods)
		}
		if n := strings.Count(log.String(), "Pod shop/x"); n != 1 {
			t.Errorf("the problem that stays was logged %d times, want once:\n%s", n, log.String())
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if err := l.Wait(ctx, 9); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}
