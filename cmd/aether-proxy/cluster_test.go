package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"aether/controlplane/registrar/server"
	"aether/controlplane/registrar/server/storetest"
	"aether/e2e/cluster/apiserver"
	"aether/e2e/rig"
	"aether/tproxy/netns/netnstest"
)

// patience is how long anything may take: the machine may be busy.
const patience = time.Minute

// TestClusterPods: a proxy, and then its successor, lead a pod of their node as a real API
// server says, and tell a registrar of it.
func TestClusterPods(t *testing.T) {
	api := apiserver.Start(t)
	client, ns := api.Client(t), api.Namespace(t)
	api.Account(t, ns, "cart")
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()

	store := storetest.New("local", "local")
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- server.New(server.Config{Store: store, Drain: -1}).Run(ctx, ln) }()
	t.Cleanup(func() {
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})

	// Two pods that the API server has, and the plugin has added.
	const node = "n1"
	dir := t.TempDir()
	pods := filepath.Join(dir, "pods")
	if err := os.Mkdir(pods, 0o700); err != nil {
		t.Fatal(err)
	}
	for i, name := range []string{"cart-1", "cart-2"} {
		ip := fmt.Sprintf("10.7.0.%d", i+1)
		space := netnstest.New(t)
		netnstest.Address(t, space, ip+"/32")
		netnstest.Do(t, space, func() error {
			l, err := net.Listen("tcp", "127.0.0.1:8080")
			if err == nil {
				s := &http.Server{Handler: http.NotFoundHandler()}
				go func() { _ = s.Serve(l) }() // ends with Close
				t.Cleanup(func() { s.Close() })
			}
			return err
		})
		p, err := client.CoreV1().Pods(ns).Create(t.Context(), &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"aether.io/managed": "true"}},
			Spec: corev1.PodSpec{NodeName: node, ServiceAccountName: "cart", Containers: []corev1.Container{{
				Name: "app", Image: "app:1", Lifecycle: &corev1.Lifecycle{PreStop: &corev1.LifecycleHandler{Sleep: &corev1.SleepAction{Seconds: 8}}},
			}}},
		}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		record, err := json.Marshal(map[string]any{
			"version": 1, "namespace": ns, "name": name, "uid": p.UID, "service_account": "cart", "container_id": name, "network_namespace": space.Path(),
			"ips": []string{ip}, "labels": p.Labels, "annotations": map[string]string{"endpoint.aether.io/ports": "8080=tcp"}, "health": "UNHEALTHY",
		})
		if err == nil {
			err = os.WriteFile(filepath.Join(pods, name+".json"), record, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	is := func(ip, want string) { // the health of its row; empty: it has none
		t.Helper()
		in, end := context.WithTimeout(ctx, patience)
		defer end()
		if err := rig.Until(in, func(context.Context) error {
			has := ""
			for _, r := range store.All() {
				if r.IP == ip {
					has = r.Endpoint.GetHealth().String()
				}
			}
			if has != want {
				return fmt.Errorf("%s is %q, want %q", ip, has, want)
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	remove := func(name string, grace int64) {
		t.Helper()
		if err := client.CoreV1().Pods(ns).Delete(t.Context(), name, metav1.DeleteOptions{GracePeriodSeconds: &grace}); err != nil {
			t.Fatal(err)
		}
	}
	o := options{
		node: node, domain: "mesh.test", devCA: filepath.Join(dir, "ca"), netnsDir: "/run/netns", logLevel: "info", logFormat: "text", blocking: "safe", records: "own",
		minLoops: 1, maxLoops: 1, handover: filepath.Join(dir, "handover"), drainTime: time.Second, redirectAll: true, cluster: "local",
		registrar: []string{ln.Addr().String()}, registrarInsecure: true, registrarAccount: "a/b", nodeAccount: "a/b", podsDir: pods, stateDir: dir,
		kubeconfig: apiserver.Kubeconfig(t, api.Config()), namespace: "aether-system",
	}
	start := func() (ended <-chan error) {
		done := make(chan error, 1)
		go func() { done <- run(ctx, make(chan struct{}), o) }()
		return done
	}
	first := start()
	is("10.7.0.1", "HEALTHY")
	is("10.7.0.2", "HEALTHY")
	remove("cart-1", 60)
	is("10.7.0.1", "DRAINING")

	second := start()
	select {
	case err := <-first:
		if err != nil {
			t.Error(err)
		}
	case err := <-second:
		t.Fatalf("the successor has ended: %v", err)
	case <-time.After(patience):
		t.Fatal("the successor does not take over")
	}
	is("10.7.0.1", "UNHEALTHY") // whichever of them says so
	remove("cart-1", 0)
	is("10.7.0.1", "")
	remove("cart-2", 60)
	is("10.7.0.2", "DRAINING")
	remove("cart-2", 0)
	is("10.7.0.2", "")
	cancel()
	select {
	case err := <-second:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(patience):
		t.Fatal("the successor does not end")
	}
}
