package demo

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"aether/e2e/mesh"
)

// Registry are the binaries of a mesh with a registry.
type Registry = mesh.Registry

// patience is for what a probe has to see first: each application is asked every 5 s.
const patience = 30 * time.Second

// registered returns once the applications that are called have been found healthy by
// their own nodes, and the other node has heard from the registrar that they are there. Where
// their pods are it asks when they are called first.
func (d *demo) registered(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for _, name := range []string{"cart-1", "db-1"} {
		pod := d.mesh.Pod(name)
		if err := d.mesh.AwaitRows(ctx, pod, "HEALTHY"); err != nil {
			return err
		}
		if err := d.mesh.AwaitName(ctx, 0, strings.TrimSuffix(name, "-1")); err != nil {
			return err
		}
	}
	d.head("what etcd has: a row a pod and class, written by the pod's own node")
	return d.rows(ctx)
}

func (d *demo) rows(ctx context.Context) error {
	rows, err := d.mesh.Rows(ctx)
	if err != nil {
		return err
	}
	for _, r := range rows {
		d.say("    %-9s %-13s %-10s %s", r.Service, r.Class, r.IP, r.Health)
	}
	return nil
}

// leave shows the end of a pod: nobody sends to it any more while it still answers, and
// once it is gone its row is, too.
func (d *demo) leave(ctx context.Context) {
	d.head("an application goes away: its row says DRAINING, then there is none")
	d.n++
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if err := d.left(ctx); err != nil {
		d.bad++
		d.say("BAD %v", err)
	}
}

func (d *demo) left(ctx context.Context) error {
	metrics, err := d.mesh.Admin(ctx, 0, "/metrics")
	if err != nil {
		return err
	}
	if !strings.Contains(string(metrics), `aether_cold_total{result="came"} `) || strings.Contains(string(metrics), `aether_cold_total{result="came"} 0`) {
		return errors.New("no call waited for rows: node1 had those of services that it does not declare")
	}
	db := d.mesh.Pod("db-1")
	start := time.Now()
	if err := d.mesh.Terminate("db-1"); err != nil {
		return err
	}
	if err := d.mesh.AwaitUsable(ctx, 0, db, false); err != nil {
		return err
	}
	drained := time.Since(start)
	if err := d.mesh.AwaitRows(ctx, db, "DRAINING"); err != nil {
		return err
	}
	if err := d.rows(ctx); err != nil {
		return err
	}
	if err := d.mesh.RemovePod("db-1"); err != nil {
		return err
	}
	if err := d.mesh.AwaitRows(ctx, db, ""); err != nil {
		return err
	}
	d.say("ok  no node sends to db-1 any more [%v after its deletion], and etcd has no row of it", drained.Round(time.Millisecond))
	if err := d.rows(ctx); err != nil {
		return err
	}
	got, err := d.get("10.96.0.10:8080", "cart", "/still")(ctx, d.mesh.Pod("web-1"))
	if err != nil || !strings.HasPrefix(got, "200 ") {
		return fmt.Errorf("cart, which stays, answers %q: %w", got, err)
	}
	return nil
}
