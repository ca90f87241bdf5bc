package gamma

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// TestTermination: contract 13.3: the largest sleep counts, a command is none, and what the
// deletion says stands over the pod.
func TestTermination(t *testing.T) {
	sleep := func(s int64) *corev1.LifecycleHandler {
		return &corev1.LifecycleHandler{Sleep: &corev1.SleepAction{Seconds: s}}
	}
	exec := &corev1.LifecycleHandler{Exec: &corev1.ExecAction{Command: []string{"sleep", "60"}}}
	n := func(s int64) *int64 { return &s }
	for _, tt := range []struct {
		name           string
		hooks          []*corev1.LifecycleHandler
		spec, deletion *int64
		preStop, grace time.Duration
	}{
		{"nothing is said", nil, nil, nil, 0, 30 * time.Second},
		{"the largest", []*corev1.LifecycleHandler{sleep(3), nil, sleep(9), exec}, n(40), nil, 9 * time.Second, 40 * time.Second},
		{"a command", []*corev1.LifecycleHandler{exec}, n(40), n(5), 0, 5 * time.Second},
		{"killed at once", []*corev1.LifecycleHandler{sleep(3)}, n(40), n(0), 3 * time.Second, 0},
		{"no numbers of a pod", []*corev1.LifecycleHandler{sleep(1 << 40)}, n(1 << 62), nil, maxTermination, maxTermination},
		{"negative", []*corev1.LifecycleHandler{sleep(-1)}, n(-1), n(-1 << 62), 0, 0},
	} {
		p := corev1.Pod{Spec: corev1.PodSpec{TerminationGracePeriodSeconds: tt.spec}}
		p.DeletionGracePeriodSeconds = tt.deletion
		p.Spec.Containers = []corev1.Container{{Lifecycle: &corev1.Lifecycle{}}}
		for _, h := range tt.hooks {
			p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Lifecycle: &corev1.Lifecycle{PreStop: h}})
		}
		if preStop, grace := Termination(&p); preStop != tt.preStop || grace != tt.grace {
			t.Errorf("%s: %s, %s; want %s, %s", tt.name, preStop, grace, tt.preStop, tt.grace)
		}
	}
}
